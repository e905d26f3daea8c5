"""A full-parameter run as a folder: a float32 model in the Hugging Face layout, and the state for resuming.

`torch.distributed.checkpoint` (DCP) writes and reads the tensors in its safetensors format, so nothing is pickled. The
weights are ordinary model files. The state for resuming is in the folder `trainer_state`. A folder is written beside
its target and renamed when it is complete; `b3sums` has the digests of its files.
"""

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter

from twinkle.checkpoint_engine import AdapterMismatch, InvalidModelFolder
from twinkle.checkpoint_engine.digest_file import check_digests, write_digests
from twinkle.checkpoint_engine.hf_folder import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, ModelFolder
from twinkle.checkpoint_engine.peft_folder import replace_folder
from twinkle.data_format import TensorData
from twinkle.model.checkpoint_folder import TRAINER_STATE_FILE, VALUE_HEAD_FILE, read_tensors, write_tensors
from twinkle.model.engine import AdapterSnapshot
from twinkle.model.engine.snapshot import trainer_state
from twinkle.model.errors import SnapshotMismatch
from twinkle.nn import tensor_data_of, tensor_of

TRAINER_FOLDER = 'trainer_state'
"""Folder with optimizer, schedule, counters, random state and accumulated gradient, as written by DCP."""
_DTYPE = 'float32'
"""Dtype of the saved weights, which is that of the training, so that a resumed run continues bitwise."""
_SHARDS_FOLDER = 'sharded'
"""Folder in which DCP writes parts of the weights before it combines them."""


def write_model_checkpoint(folder: Path, snapshot: AdapterSnapshot, *, base_folder: Path) -> None:
    """Write a checkpoint, replacing an existing one. After an error, the existing one is unchanged.

    Args:
        folder: folder to write; missing parents are created.
        snapshot: state of the run. Weights that it does not contain are copied from the base model.
        base_folder: folder of the base model, whose configuration and tokenizer are copied.

    Raises:
        AdapterMismatch: the base model's folder lacks a weight, or has another shape for it.
        InvalidModelFolder: the base model's folder is malformed.
        OSError: writing failed.
    """
    base = ModelFolder.open(base_folder)
    _check_names(base, snapshot.adapter)
    staging = folder.with_name(f'.{folder.name}.saving')
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        _write_weights(staging, base, {**_other_weights(base, snapshot), **_tensors(snapshot.adapter)})
        if snapshot.trainer is not None:
            with _dcp_call():
                writer = HuggingFaceStorageWriter(str(staging / TRAINER_FOLDER), save_distributed=True)
                dcp.save(_tensors(snapshot.trainer), storage_writer=writer, no_dist=True)
        write_tensors(staging / VALUE_HEAD_FILE, snapshot.value_head)
        write_digests(staging)
        previous = folder.with_name(f'.{folder.name}.previous')
        shutil.rmtree(previous, ignore_errors=True)
        replace_folder(folder, staging, previous=previous)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_model_checkpoint(folder: Path, shapes: Mapping[str, tuple[int, ...]], *, base_folder: Path) -> AdapterSnapshot:
    """Read a checkpoint, or the weights of any model folder.

    Args:
        folder: folder that `write_model_checkpoint` or an earlier release wrote, or any folder in the Hugging Face
            layout.
        shapes: shapes of the trained weights, by the model's parameter names.
        base_folder: folder of the base model, which must have the same architecture.

    Raises:
        SnapshotMismatch: the folder is incomplete or damaged, or its model has other weights.
    """
    try:
        if (folder / TRAINER_FOLDER).exists():
            check_digests(folder)
        _check_architecture(folder, base_folder)
        weights = _read_weights(folder, shapes)
        trainer = _read_trainer(folder)
    except (InvalidModelFolder, SafetensorError, OSError) as error:
        raise SnapshotMismatch(f'{folder} is not a checkpoint of the model: {error}') from error
    head = read_tensors(folder / VALUE_HEAD_FILE)
    snapshot = AdapterSnapshot(None, weights, trainer, 0, (), head)
    if trainer is None:
        return snapshot
    return AdapterSnapshot(None, weights, trainer, int(trainer_state(snapshot)['step_count']), (), head)


def _check_names(base: ModelFolder, weights: Mapping[str, TensorData]) -> None:
    entries = base.entries
    for name, data in weights.items():
        if name not in entries or entries[name].shape != data.shape:
            raise AdapterMismatch(f'the folder of the base model has no weight {name} of shape {data.shape}')


def _check_architecture(folder: Path, base_folder: Path) -> None:
    own, other = (ModelFolder.open(path).config.get('model_type') for path in (base_folder, folder))
    if own != other:
        raise SnapshotMismatch(f'{folder} has a model of type {other!r}, but the base model has type {own!r}')


def _tensors(state: Mapping[str, TensorData]) -> dict[str, Tensor]:
    return {name: tensor_of(data) for name, data in state.items()}


def _other_weights(base: ModelFolder, snapshot: AdapterSnapshot) -> dict[str, Tensor]:
    """Return the base model's tensors that the run does not train."""
    found: dict[str, Tensor] = {}
    for shard in base.shards:
        with safe_open(shard.path, framework='pt') as file:
            for name in (entry.name for entry in shard.entries if entry.name not in snapshot.adapter):
                tensor = file.get_tensor(name)
                found[name] = tensor.to(getattr(torch, _DTYPE)) if tensor.is_floating_point() else tensor
    return found


def _write_weights(staging: Path, base: ModelFolder, weights: Mapping[str, Tensor]) -> None:
    """Write as many weights files as the base model has, with its configuration and tokenizer."""
    for file in base.companions:
        shutil.copyfile(file, staging / file.name)
    (staging / CONFIG_FILE).write_text(json.dumps(base.config_in(_DTYPE), indent=2, sort_keys=True))
    file_numbers = {entry.name: number for number, shard in enumerate(base.shards, 1) for entry in shard.entries}
    with _dcp_call():
        writer = HuggingFaceStorageWriter(
            str(staging), fqn_to_index_mapping=file_numbers, save_distributed=True, enable_consolidation=True
        )
        dcp.save(dict(weights), storage_writer=writer, no_dist=True)
    shutil.rmtree(staging / _SHARDS_FOLDER)
    if len(base.shards) == 1:
        next(staging.glob('*.safetensors')).rename(staging / SINGLE_FILE)
        (staging / INDEX_FILE).unlink()


def _read_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorData]:
    entries = ModelFolder.open(folder).entries
    for name, shape in shapes.items():
        if name not in entries or entries[name].shape != shape:
            raise SnapshotMismatch(f'{folder} has no weight {name} of shape {shape}')
    weights = {name: torch.empty(shape, dtype=getattr(torch, _DTYPE)) for name, shape in shapes.items()}
    with _dcp_call():
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {name: tensor_data_of(tensor) for name, tensor in weights.items()}


def _read_trainer(folder: Path) -> dict[str, TensorData] | None:
    if not (folder / TRAINER_FOLDER).exists():
        # Earlier releases and the checkpoint service write one file.
        return read_tensors(folder / TRAINER_STATE_FILE)
    reader = HuggingFaceStorageReader(str(folder / TRAINER_FOLDER))
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    with _dcp_call():
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {name: tensor_data_of(tensor) for name, tensor in state.items()}


@contextmanager
def _dcp_call() -> Iterator[None]:
    """Raise the errors of DCP as `OSError`; ignore its warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')
        try:
            yield
        except CheckpointException as error:
            raise OSError(f'the checkpoint could not be written or read: {error}') from error
