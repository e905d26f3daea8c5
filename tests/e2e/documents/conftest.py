"""A folder like a checkout of the repository, in which documented commands and programs run."""

from pathlib import Path

import pytest

from fixtures.documented import Checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Folder with links to the repository's files, and a separate folder for the state of services."""
    folder = tmp_path / 'checkout'
    folder.mkdir()
    return Checkout(folder, {'TWINKLE_STATE_DIR': str(tmp_path / 'state')})
