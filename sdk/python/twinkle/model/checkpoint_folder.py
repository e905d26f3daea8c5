"""A checkpoint of an adapter as a folder: a peft folder, with additional files for resuming.

`twinkle.model.model_checkpoint` writes and reads the checkpoints of full-parameter runs.

The checkpoint service also writes `trainer_state.safetensors`, so this library and the services can resume each other's
checkpoints. Nothing is pickled.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from twinkle.checkpoint_engine import InvalidPeftFolder, adapter_card, read_peft_folder, write_peft_folder
from twinkle.data_format import TensorData
from twinkle.hub import CARD_FILE, repository_name
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


def write_checkpoint(folder: Path, snapshot: AdapterSnapshot, *, base_model: str) -> None:
    """Write the checkpoint of an adapter with a model card, replacing an existing checkpoint.

    A base model in a folder is named by its path, as in peft, so that the adapter can be loaded on this machine.

    Raises:
        ValueError: the snapshot is of a full-parameter run.
        OSError: writing failed.
    """
    if snapshot.lora_config is None:
        raise ValueError('a full-parameter run has no peft folder; use write_model_checkpoint')
    named = repository_name(base_model) or base_model
    write_peft_folder(folder, snapshot.adapter, snapshot.lora_config, base_model=named)
    facts = {'optimizer steps': str(snapshot.step_count)} if snapshot.step_count else {}
    card = adapter_card(snapshot.lora_config, title=folder.name, base_model=base_model, facts=facts)
    (folder / CARD_FILE).write_bytes(card)
    write_tensors(folder / VALUE_HEAD_FILE, snapshot.value_head)
    write_tensors(folder / TRAINER_STATE_FILE, snapshot.trainer)


def read_checkpoint(folder: Path) -> AdapterSnapshot:
    """Read the checkpoint of an adapter.

    Raises:
        SnapshotMismatch: the folder is malformed, or not a checkpoint of an adapter.
    """
    try:
        weights, config = read_peft_folder(folder)
    except InvalidPeftFolder as error:
        raise SnapshotMismatch(f'{folder} is not a checkpoint: {error}') from error
    head, trainer = read_tensors(folder / VALUE_HEAD_FILE), read_tensors(folder / TRAINER_STATE_FILE)
    # The checkpoint service stores a value head only in the trainer state.
    head = head or {name: data for name, data in (trainer or {}).items() if name.startswith(_HEAD)} or None
    snapshot = AdapterSnapshot(config, weights, trainer, 0, None, head)
    if trainer is None:
        return snapshot
    return AdapterSnapshot(config, weights, trainer, int(trainer_state(snapshot)['step_count']), None, head)


def write_tensors(path: Path, tensors: Mapping[str, TensorData] | None) -> None:
    """Write a file atomically, or remove it if there are no tensors."""
    if tensors is None:
        path.unlink(missing_ok=True)
        return
    unfinished = path.with_name(f'.{path.name}.{os.getpid()}')
    save_file({name: tensor_of(data) for name, data in tensors.items()}, unfinished)
    unfinished.replace(path)


def read_tensors(path: Path) -> dict[str, TensorData] | None:
    """Read a file of tensors; None if there is no file.

    Raises:
        SnapshotMismatch: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        return {name: tensor_data_of(tensor) for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise SnapshotMismatch(f'{path} is damaged: {error}') from error
