"""Checkpoints of adapters whose files are damaged."""

import random
import shutil
from pathlib import Path

import pytest

from twinkle.model import SnapshotMismatch
from twinkle.model.checkpoint_folder import TRAINER_STATE_FILE, VALUE_HEAD_FILE, read_checkpoint, write_checkpoint
from twinkle.model.engine import TrainerEngine


@pytest.fixture
def checkpoint(engine: TrainerEngine, make_feature, tmp_path: Path) -> Path:
    """Folder of a checkpoint with a trainer state and a value head."""
    engine.set_loss('a', 'PPOValueLoss')
    engine.forward_only('a', [make_feature()])
    folder = tmp_path / 'checkpoint'
    write_checkpoint(folder, engine.export_state('a', is_optimizer_included=True), base_model='tiny')
    return folder


@pytest.mark.parametrize('name', [TRAINER_STATE_FILE, VALUE_HEAD_FILE])
def test_damaged_tensors_are_refused_by_name(checkpoint: Path, name: str, tmp_path: Path) -> None:
    """A truncated or changed file is either read or refused with an error that names the damaged part."""
    data = (checkpoint / name).read_bytes()
    numbers = random.Random(0)
    damages = [data[: numbers.randrange(len(data))] for _ in range(20)]
    for index in range(200):
        position = numbers.randrange(len(data) if index % 2 else min(len(data), 2000))
        damages.append(data[:position] + bytes([numbers.randrange(256)]) + data[position + 1 :])
    damages.append(data.replace(b'step_count', b'step-count'))
    errors: list[str] = []
    for damage in damages:
        folder = tmp_path / 'damaged'
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(checkpoint, folder)
        (folder / name).write_bytes(damage)
        try:
            read_checkpoint(folder)
        except SnapshotMismatch as error:
            errors.append(str(error))
    assert len(errors) >= 20, 'too few truncated files were refused'
    assert all(any(text in error for text in (name, 'trainer state', 'optimizer state')) for error in errors)
    assert read_checkpoint(checkpoint).value_head is not None
