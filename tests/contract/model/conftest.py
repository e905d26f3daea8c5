"""Fixtures for the contract tests of the trainer port."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fixtures.fake_trainer import FakeTrainer
from twinkle_services.model.backends.group import GroupBackend, LoadOptions
from twinkle_services.model.ports import TrainerBackend


@pytest.fixture(params=['fake', 'local'])
async def backend(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> AsyncIterator[TrainerBackend]:
    """Each implementation of the trainer port."""
    options = LoadOptions(base_model=str(tiny_llama_dir), thread_count=1, pass_tokens=64)
    trainer = _small_passes() if request.param == 'fake' else await GroupBackend.load(options)
    yield trainer
    await trainer.close()


def _small_passes() -> FakeTrainer:
    trainer = FakeTrainer()
    trainer.pass_tokens = 64
    return trainer
