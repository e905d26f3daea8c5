"""Paths that deploy/Containerfile copies into the images."""

import pytest

from fixtures import containerfile
from fixtures.source_tree import ROOT

_COPIED = sorted(
    {
        source
        for stage in containerfile.stages().values()
        for word, rest in stage.instructions
        if word == 'COPY' and not rest.startswith('--from')
        for source in rest.split()[:-1]
    }
)
_SENT = [line.removeprefix('!') for line in (ROOT / '.dockerignore').read_text().splitlines() if line.startswith('!')]


@pytest.mark.parametrize('path', _COPIED)
def test_copied_path_exists_and_is_sent_to_the_build(path: str) -> None:
    """A path that a build copies is in the repository, and .dockerignore does not exclude it."""
    assert (ROOT / path).exists()
    assert any(path == sent or path.startswith(f'{sent}/') for sent in _SENT)
