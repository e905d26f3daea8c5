"""A checkpoint as a folder: peft's two files, and beside them what it takes to resume.

`trainer_state.safetensors` is what the checkpoint service's store writes too, so a checkpoint
saved by either can be resumed by the other. Nothing is pickled.
"""

import os
from pathlib import Path

from safetensors.torch import load_file, save_file

from twinkle.checkpoint_engine import InvalidPeftFolder, read_peft_folder, write_peft_folder
from twinkle.model.engine import AdapterSnapshot
from twinkle.model.engine.snapshot import trainer_state
from twinkle.model.errors import SnapshotMismatch
from twinkle.nn import tensor_data_of, tensor_of

TRAINER_STATE_FILE = 'trainer_state.safetensors'
"""Optimizer, schedule, counters, random state and accumulated gradient."""


def write_checkpoint(folder: Path, snapshot: AdapterSnapshot, *, base_model: str) -> None:
    """Write a checkpoint, replacing one of the same name.

    Raises:
        OSError: the disk refused.
    """
    write_peft_folder(folder, snapshot.adapter, snapshot.lora_config, base_model=base_model)
    if snapshot.trainer is None:
        return
    tensors = {name: tensor_of(data) for name, data in snapshot.trainer.items()}
    unfinished = folder / f'.{TRAINER_STATE_FILE}.{os.getpid()}'
    save_file(tensors, unfinished)
    unfinished.replace(folder / TRAINER_STATE_FILE)


def read_checkpoint(folder: Path) -> AdapterSnapshot:
    """Read a checkpoint.

    Raises:
        SnapshotMismatch: it is no checkpoint, or malformed.
    """
    try:
        adapter, config = read_peft_folder(folder)
    except InvalidPeftFolder as error:
        raise SnapshotMismatch(f'{folder} is no checkpoint: {error}') from error
    path = folder / TRAINER_STATE_FILE
    if not path.exists():
        return AdapterSnapshot(config, adapter, None, 0)
    trainer = {name: tensor_data_of(tensor) for name, tensor in load_file(path).items()}
    snapshot = AdapterSnapshot(config, adapter, trainer, 0)
    return AdapterSnapshot(config, adapter, trainer, int(trainer_state(snapshot)['step_count']))
