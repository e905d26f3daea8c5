"""A checkpoint as a folder: a peft adapter or a whole model, with additional files for resuming.

The checkpoint service also writes `trainer_state.safetensors`, so this library and the services can resume each other's
checkpoints. Nothing is pickled.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from twinkle.checkpoint_engine import (
    InvalidModelFolder,
    InvalidPeftFolder,
    export_merged,
    read_peft_folder,
    write_peft_folder,
)
from twinkle.checkpoint_engine.hf_folder import ModelFolder
from twinkle.data_format import TensorData
from twinkle.model.engine import AdapterSnapshot
from twinkle.model.engine.snapshot import trainer_state
from twinkle.model.errors import SnapshotMismatch
from twinkle.nn import tensor_data_of, tensor_of

TRAINER_STATE_FILE = 'trainer_state.safetensors'
"""File with optimizer, schedule, counters, random state and accumulated gradient."""
VALUE_HEAD_FILE = 'value_head.safetensors'
"""File with an adapter's value head: `value_head.weight` [1, hidden size] and `value_head.bias` [1], float32."""

_HEAD = 'value_head.'
"""Prefix of the names of the value head's tensors."""


def write_checkpoint(folder: Path, snapshot: AdapterSnapshot, *, base_model: str, base_folder: Path) -> None:
    """Write a checkpoint, replacing an existing one.

    Full-parameter weights are written as a whole model folder in float32, their dtype in training, so that a resumed
    run continues bitwise.

    Raises:
        OSError: writing failed.
    """
    if snapshot.lora_config is None:
        export_merged(base_folder, snapshot.adapter, None, folder, dtype='float32')
    else:
        write_peft_folder(folder, snapshot.adapter, snapshot.lora_config, base_model=base_model)
    _write(folder / VALUE_HEAD_FILE, snapshot.value_head)
    _write(folder / TRAINER_STATE_FILE, snapshot.trainer)


def read_checkpoint(folder: Path, *, model_weights: tuple[str, ...] | None = None) -> AdapterSnapshot:
    """Read a checkpoint.

    Args:
        folder: folder of the checkpoint.
        model_weights: names of the base model's weights to read for full-parameter training. None reads an adapter.

    Raises:
        SnapshotMismatch: the folder is malformed, or not a checkpoint of the requested kind.
    """
    try:
        weights, config = (
            read_peft_folder(folder) if model_weights is None else (_read_model(folder, model_weights), None)
        )
        head, trainer = _read(folder / VALUE_HEAD_FILE), _read(folder / TRAINER_STATE_FILE)
    except (InvalidPeftFolder, InvalidModelFolder) as error:
        raise SnapshotMismatch(f'{folder} is not a checkpoint: {error}') from error
    # The checkpoint service stores a value head only in the trainer state.
    head = head or {name: data for name, data in (trainer or {}).items() if name.startswith(_HEAD)} or None
    targets = None if model_weights is None else ()
    snapshot = AdapterSnapshot(config, weights, trainer, 0, targets, head)
    if trainer is None:
        return snapshot
    return AdapterSnapshot(config, weights, trainer, int(trainer_state(snapshot)['step_count']), targets, head)


def _read_model(folder: Path, names: tuple[str, ...]) -> dict[str, TensorData]:
    """Return the named weights that a model folder has."""
    found: dict[str, TensorData] = {}
    for shard in ModelFolder.open(folder).shards:
        own = {entry.name for entry in shard.entries} & set(names)
        with safe_open(shard.path, framework='pt') as file:
            found |= {name: tensor_data_of(file.get_tensor(name)) for name in sorted(own)}
    return found


def _write(path: Path, tensors: Mapping[str, TensorData] | None) -> None:
    """Write a file atomically, or remove it if there are no tensors."""
    if tensors is None:
        path.unlink(missing_ok=True)
        return
    unfinished = path.with_name(f'.{path.name}.{os.getpid()}')
    save_file({name: tensor_of(data) for name, data in tensors.items()}, unfinished)
    unfinished.replace(path)


def _read(path: Path) -> dict[str, TensorData] | None:
    if not path.exists():
        return None
    return {name: tensor_data_of(tensor) for name, tensor in load_file(path).items()}
