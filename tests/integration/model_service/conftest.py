"""Fixture of a running model service."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fixtures.model_service import RunningModel, serving_model


@pytest.fixture
async def service(tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[RunningModel]:
    """A service with a tiny Llama. An operation waits at most 0.2 seconds for missing predecessors."""
    async with serving_model(tiny_llama_dir, tmp_path, gap_seconds=0.2) as running:
        yield running
