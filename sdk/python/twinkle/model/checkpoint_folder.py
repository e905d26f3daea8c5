"""A checkpoint as a folder: an adapter's two files of peft, or a whole model, and beside them what it takes to resume.

`trainer_state.safetensors` is what the checkpoint service's store writes too, so a checkpoint
saved by either can be resumed by the other. Nothing is pickled.
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
"""Optimizer, schedule, counters, random state and accumulated gradient."""
VALUE_HEAD_FILE = 'value_head.safetensors'
"""The value head of an adapter that has one: `value_head.weight` [1, D] and `value_head.bias` [1], float32."""

_HEAD = 'value_head.'


def write_checkpoint(folder: Path, snapshot: AdapterSnapshot, *, base_model: str, base_folder: Path) -> None:
    """Write a checkpoint, replacing one of the same name.

    The base model's own weights become a whole model folder in float32, as they are trained, so that a resumed run
    has the same bits.

    Raises:
        OSError: the disk refused.
    """
    if snapshot.lora_config is None:
        export_merged(base_folder, snapshot.adapter, None, folder, dtype='float32')
    else:
        write_peft_folder(folder, snapshot.adapter, snapshot.lora_config, base_model=base_model)
    _write(folder / VALUE_HEAD_FILE, snapshot.value_head)
    _write(folder / TRAINER_STATE_FILE, snapshot.trainer)


def read_checkpoint(folder: Path, *, whole: tuple[str, ...] | None = None) -> AdapterSnapshot:
    """Read a checkpoint.

    Args:
        folder: where it is.
        whole: names of the base model's own weights to read, where they are what is trained. None: an adapter.

    Raises:
        SnapshotMismatch: it is no checkpoint of that kind, or malformed.
    """
    try:
        weights, config = read_peft_folder(folder) if whole is None else (_read_model(folder, whole), None)
        head, trainer = _read(folder / VALUE_HEAD_FILE), _read(folder / TRAINER_STATE_FILE)
    except (InvalidPeftFolder, InvalidModelFolder) as error:
        raise SnapshotMismatch(f'{folder} is no checkpoint: {error}') from error
    # The checkpoint service keeps a head in the trainer's part alone.
    head = head or {name: data for name, data in (trainer or {}).items() if name.startswith(_HEAD)} or None
    targets = None if whole is None else ()
    snapshot = AdapterSnapshot(config, weights, trainer, 0, targets, head)
    if trainer is None:
        return snapshot
    return AdapterSnapshot(config, weights, trainer, int(trainer_state(snapshot)['step_count']), targets, head)


def _read_model(folder: Path, names: tuple[str, ...]) -> dict[str, TensorData]:
    """Return what there is of the named weights of a model folder."""
    found: dict[str, TensorData] = {}
    for shard in ModelFolder.open(folder).shards:
        own = {entry.name for entry in shard.entries} & set(names)
        with safe_open(shard.path, framework='pt') as file:
            found |= {name: tensor_data_of(file.get_tensor(name)) for name in sorted(own)}
    return found


def _write(path: Path, tensors: Mapping[str, TensorData] | None) -> None:
    """Write a file whole, or see that there is none."""
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
