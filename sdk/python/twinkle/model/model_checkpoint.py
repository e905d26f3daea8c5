"""A full-parameter run as a folder: a float32 model in the Hugging Face layout, and the state for resuming.

`torch.distributed.checkpoint` (DCP) writes and reads the tensors in its safetensors format, so nothing is pickled. The
weights are ordinary model files. The state for resuming is in the folder `trainer_state`. A folder is written next to
its target and renamed when it is complete; `b3sums` has the digests of its files.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from twinkle.checkpoint_engine import AdapterMismatch, InvalidModelFolder
from twinkle.checkpoint_engine.digest_file import DIGESTS_FILE, check_digests, write_digests
from twinkle.checkpoint_engine.hf_folder import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, ModelFolder
from twinkle.checkpoint_engine.peft_folder import replace_folder
from twinkle.data_format import TensorData
from twinkle.model.checkpoint_folder import TRAINER_STATE_FILE, VALUE_HEAD_FILE, read_tensors, write_tensors
from twinkle.model.engine import AdapterSnapshot
from twinkle.model.engine.snapshot import divided_parameter, trainer_state
from twinkle.model.errors import SnapshotMismatch
from twinkle.nn import TensorShard, tensor_data_of, tensor_of

_Value = TypeVar('_Value')

TRAINER_FOLDER = 'trainer_state'
"""Folder with optimizer, schedule, counters, random state and accumulated gradient, as written by DCP."""
_DTYPE = 'float32'
"""Dtype of the saved weights, equal to the dtype of training, so that a resumed run continues bitwise."""
_SHARDS_FOLDER = 'sharded'
"""Folder in which DCP writes parts of the weights before it combines them."""


class Ranks(Protocol):
    """Exchange between the ranks of a sharded model; see `BatchShares` for arguments and results."""

    def gather(self, call: str, make: Callable[[], Sequence[_Value]]) -> tuple[list[_Value], slice]:
        """Call `make` on all ranks and return all values. If it fails on a rank, raise its exception on all ranks."""
        ...

    def on_first(self, call: str, work: Callable[[], _Value]) -> _Value:
        """Call `work` on the first rank only, and return its result, or raise its exception, on all ranks."""
        ...


def write_model_checkpoint(folder: Path, snapshot: AdapterSnapshot, *, base_folder: Path, ranks: Ranks) -> None:
    """Write a checkpoint, replacing an existing checkpoint. After an error, the existing checkpoint is unchanged.

    Every rank must call it. If the snapshot has shards, each rank writes its shards, and the first rank combines the
    shards of the weights, one file at a time. Otherwise, the first rank writes everything.

    Args:
        folder: folder to write, on a disk that all ranks share; missing parents are created.
        snapshot: state of the run. Weights that it does not contain are copied from the base model.
        base_folder: folder of the base model, whose configuration and tokenizer are copied.
        ranks: ranks that have snapshots of the same run.

    Raises:
        AdapterMismatch: the base model's folder lacks a weight of the snapshot, or has a different shape for it.
        InvalidModelFolder: the base model's folder is malformed.
        OSError: writing failed.
    """
    staging = folder.with_name(f'.{folder.name}.saving')
    is_sharded = any(isinstance(data, TensorShard) for data in snapshot.adapter.values())

    weights: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}

    def read_base() -> Sequence[None]:
        base = ModelFolder.open(base_folder)
        numbers.update(_file_numbers(base))
        weights.update({**_weights_without(base, snapshot.adapter), **_tensors(snapshot.adapter)})
        return ()

    def write() -> None:
        writer = HuggingFaceStorageWriter(
            str(staging), fqn_to_index_mapping=numbers, save_distributed=True, enable_consolidation=True
        )
        _save(weights, writer, is_sharded=is_sharded)
        if snapshot.trainer is not None:
            writer = HuggingFaceStorageWriter(str(staging / TRAINER_FOLDER), save_distributed=True)
            _save(_tensors(snapshot.trainer), writer, is_sharded=is_sharded)

    def finish() -> None:
        _arrange_files(staging, base_folder)
        write_tensors(staging / VALUE_HEAD_FILE, snapshot.value_head)
        write_digests(staging)
        _replace(folder, staging)

    try:
        ranks.on_first(f'began to save {folder.name}', lambda: _prepare(staging, base_folder, snapshot))
        if is_sharded:
            # DCP raises errors in its calls on all ranks. Earlier errors must be exchanged, or DCP would wait for the
            # rank that failed.
            ranks.gather(f'read the base model of {folder.name}', read_base)
            write()
        else:
            ranks.on_first(f'wrote {folder.name}', lambda: (read_base(), write()))
        ranks.on_first(f'saved {folder.name}', finish)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_model_checkpoint(
    folder: Path, parameters: Mapping[str, Tensor], *, base_folder: Path, ranks: Ranks
) -> AdapterSnapshot:
    """Read a checkpoint, or the weights of any model folder. Every rank must call it; each reads only its shards.

    Args:
        folder: folder that `write_model_checkpoint` or an earlier release wrote, or any folder in the Hugging Face
            layout. A different number of ranks may have written it.
        parameters: trained weights, by the model's parameter names; not changed.
        base_folder: folder of the base model, which must have the same architecture.
        ranks: ranks that read the same folder.

    Raises:
        SnapshotMismatch: the folder is incomplete or damaged, its model has other weights, or a weight that is not
            trained differs from the base model.
    """
    try:
        ranks.on_first(f'checked {folder}', lambda: _check(folder, base_folder, parameters))
        weights = _load(folder, {name: _empty_like(parameter) for name, parameter in parameters.items()})
        trainer = _read_trainer(folder, parameters)
    except (InvalidModelFolder, SafetensorError, OSError) as error:
        raise SnapshotMismatch(f'{folder} is not a checkpoint of the model: {error}') from error
    head = read_tensors(folder / VALUE_HEAD_FILE)
    snapshot = AdapterSnapshot(None, weights, trainer, 0, (), head)
    if trainer is None:
        return snapshot
    return AdapterSnapshot(None, weights, trainer, int(trainer_state(snapshot)['step_count']), (), head)


def _prepare(staging: Path, base_folder: Path, snapshot: AdapterSnapshot) -> None:
    """Check that the base model has the weights of the snapshot, and create an empty folder."""
    _check_names(ModelFolder.open(base_folder), snapshot.adapter)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)


def _replace(folder: Path, staging: Path) -> None:
    previous = folder.with_name(f'.{folder.name}.previous')
    shutil.rmtree(previous, ignore_errors=True)
    replace_folder(folder, staging, previous=previous)
    shutil.rmtree(previous, ignore_errors=True)


def _check(folder: Path, base_folder: Path, parameters: Mapping[str, Tensor]) -> None:
    """Check a folder before its trained tensors are read.

    Raises:
        SnapshotMismatch, InvalidModelFolder: see `read_model_checkpoint`.
    """
    if (folder / DIGESTS_FILE).exists() or (folder / TRAINER_FOLDER).exists():
        check_digests(folder)
    saved, base = ModelFolder.open(folder), ModelFolder.open(base_folder)
    own, other = (model.config.get('model_type') for model in (base, saved))
    if own != other:
        raise SnapshotMismatch(f'{folder} has a model of type {other!r}, but the base model has type {own!r}')
    # DCP reads all files of the folder, with or without a digest.
    known = {VALUE_HEAD_FILE, TRAINER_STATE_FILE, *(shard.path.name for shard in saved.shards)}
    if others := sorted(path.name for path in folder.glob('*.safetensors') if path.name not in known):
        raise SnapshotMismatch(f'{folder} has weights that do not belong to its model; remove {others[0]}')
    entries = saved.entries
    for name, parameter in parameters.items():
        if name not in entries or entries[name].shape != tuple(parameter.shape):
            raise SnapshotMismatch(f'{folder} has no weight {name} of shape {tuple(parameter.shape)}')
    own, others = _weights_without(base, parameters), _weights_without(saved, parameters)
    changed = [name for name in own if name in others and not torch.equal(own[name], others[name])]
    if changed:
        raise SnapshotMismatch(
            f'{folder} has a trained weight {changed[0]}, which this run does not train; train this weight, too'
        )


def _check_names(base: ModelFolder, weights: Mapping[str, TensorData]) -> None:
    entries = base.entries
    for name, data in weights.items():
        if name not in entries or entries[name].shape != data.shape:
            raise AdapterMismatch(f'the folder of the base model has no weight {name} of shape {data.shape}')


def _tensors(state: Mapping[str, TensorData]) -> dict[str, Tensor]:
    return {name: tensor_of(data) for name, data in state.items()}


def _weights_without(model: ModelFolder, trained: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors of a model folder that are not trained; floating-point tensors become float32."""
    found: dict[str, Tensor] = {}
    for shard in model.shards:
        with safe_open(shard.path, framework='pt') as file:
            for name in (entry.name for entry in shard.entries if entry.name not in trained):
                tensor = file.get_tensor(name)
                found[name] = tensor.to(getattr(torch, _DTYPE)) if tensor.is_floating_point() else tensor
    return found


def _file_numbers(base: ModelFolder) -> dict[str, int]:
    """Return the number of each tensor's weights file, from 1, as in the base model."""
    return {entry.name: number for number, shard in enumerate(base.shards, 1) for entry in shard.entries}


def _arrange_files(staging: Path, base_folder: Path) -> None:
    """Add the configuration and the tokenizer, remove the shards, and give a single weights file its usual name."""
    base = ModelFolder.open(base_folder)
    for file in base.companions:
        shutil.copyfile(file, staging / file.name)
    (staging / CONFIG_FILE).write_text(json.dumps(base.config_in(_DTYPE), indent=2, sort_keys=True))
    shutil.rmtree(staging / _SHARDS_FOLDER)
    if len(base.shards) == 1:
        next(staging.glob('*.safetensors')).rename(staging / SINGLE_FILE)
        (staging / INDEX_FILE).unlink()


def _read_trainer(folder: Path, parameters: Mapping[str, Tensor]) -> dict[str, TensorData] | None:
    if not (folder / TRAINER_FOLDER).exists():
        # Earlier releases and the checkpoint service write one file, which has whole tensors.
        return read_tensors(folder / TRAINER_STATE_FILE)
    found = HuggingFaceStorageReader(str(folder / TRAINER_FOLDER)).read_metadata().state_dict_metadata
    empty: dict[str, Tensor] = {}
    for name, entry in found.items():
        like = divided_parameter(name, entry.size, parameters)
        empty[name] = torch.empty(entry.size, dtype=entry.properties.dtype) if like is None else _empty_like(like)
    return _load(folder / TRAINER_FOLDER, empty)


def _empty_like(parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        return torch.empty_like(parameter.detach())
    return torch.empty(parameter.shape, dtype=parameter.dtype)


def _save(tensors: Mapping[str, Tensor], writer: HuggingFaceStorageWriter, *, is_sharded: bool) -> None:
    with _dcp_call():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=not is_sharded)


def _load(folder: Path, empty: dict[str, Tensor]) -> dict[str, TensorData]:
    is_sharded = any(isinstance(tensor, DTensor) for tensor in empty.values())
    with _dcp_call():
        dcp.load(empty, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not is_sharded)
    return {name: tensor_data_of(tensor) for name, tensor in empty.items()}


@contextmanager
def _dcp_call() -> Iterator[None]:
    """Raise the errors of DCP as `OSError`; ignore its warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')
        try:
            yield
        except CheckpointException as error:
            raise OSError(f'the checkpoint could not be written or read: {error}') from error
