"""Merges an adapter into its base model and writes a model folder that tools without LoRA support can load.

For each adapted layer, `W + scaling B A` is computed in float32, one block of rows at a time. All other tensors are
copied, or converted to the requested dtype. Memory use is independent of the size of the model: a few blocks, and the
weights to merge in float32.

The output is written to a temporary folder next to the target and renamed when it is complete. An interrupted merge
resumes after the last complete file, and repeating a finished merge has no effect.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from twinkle.checkpoint_engine.errors import InvalidModelFolder, MergeRunning
from twinkle.checkpoint_engine.float_bytes import FLOAT_DTYPES, from_float32, to_float32
from twinkle.checkpoint_engine.hf_folder import CONFIG_FILE, INDEX_FILE, ModelFolder, Shard
from twinkle.checkpoint_engine.manifest import DTYPE_BYTES, TensorEntry
from twinkle.checkpoint_engine.safetensors_file import FileEntry, build_header
from twinkle.checkpoint_engine.weight_changes import WeightChange, changes_of
from twinkle.data_format import LoraConfig, TensorData

MERGE_FILE = 'twinkle_merge.json'
"""File in the output folder with the digest of the inputs, by which a repeated merge is recognized."""
OUTPUT_DTYPES = ('bfloat16', 'float16', 'float32')
"""Supported data types of the output."""
_BLOCK_BYTES = 4 << 20
"""Maximum size of a block of rows in float32. Merging takes three times as long with 64 MiB, 1.5 times with 1 MiB."""

Progress = Callable[[int, int], None]
"""Function that is called with the number of processed bytes of the base model's tensors and with their total size."""


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge."""

    folder: Path
    size_bytes: int
    """Size of the written tensors."""
    merged_layer_count: int
    """Number of weights of the base model that were changed."""
    is_repeat: bool
    """Whether the folder already existed with the result of the same inputs."""


def export_merged(
    base_folder: str | os.PathLike[str],
    adapter_state: Mapping[str, TensorData],
    lora_config: LoraConfig | None,
    out_folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    on_progress: Progress | None = None,
) -> MergeResult:
    """Write a model folder with an adapter merged in, or with weights replaced. An existing folder is replaced.

    Args:
        base_folder: the base model in the Hugging Face layout; only read.
        adapter_state: the adapter's weights by PEFT's canonical names, or full weights by the base model's names.
        lora_config: the adapter's configuration. None: `adapter_state` contains full weights.
        out_folder: the folder to write. Missing parents are created.
        dtype: data type of the floating-point weights, from `OUTPUT_DTYPES`. None: the base model's data types.
        on_progress: called after every block.

    Raises:
        InvalidModelFolder: the base model's folder is malformed or quantized.
        AdapterMismatch: the adapter is inconsistent, or a layer is missing in the model or has a different shape there.
        MergeRunning: another process is writing the same folder.
        ValueError: `dtype` is not supported.
        OSError: reading or writing failed.

    Idempotency: a folder with the result of the same inputs is left unchanged.
    """
    if dtype is not None and dtype not in OUTPUT_DTYPES:
        raise ValueError(f'dtype must be one of {OUTPUT_DTYPES}, got {dtype!r}')
    base, target = ModelFolder.open(base_folder), Path(out_folder)
    changes = changes_of(base, adapter_state, lora_config)
    digest = _digest(base, adapter_state, lora_config, dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f'.{target.name}.merging'
    with _locked(staging, target):
        is_repeat = _has_digest(target, digest)
        if not is_repeat:
            _prepare(staging, digest)
            size_bytes = _write(base, changes, staging, dtype=dtype, report=on_progress or _ignore_progress)
            _publish(staging, target, digest, size_bytes)
        size_bytes = int(json.loads((target / MERGE_FILE).read_bytes())['size_bytes'])
    return MergeResult(target, size_bytes, len(changes), is_repeat)


def _digest(base: ModelFolder, state: Mapping[str, TensorData], config: LoraConfig | None, dtype: str | None) -> str:
    """Return a digest of the inputs; the base model's shards are identified by path, size and modification time."""
    hasher = blake3()
    for shard in base.shards:
        stat = shard.path.stat()
        hasher.update(f'{shard.path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n'.encode())
    for name in sorted(state):
        hasher.update(f'{name} {state[name].dtype} {state[name].shape}\n'.encode())
        hasher.update(state[name].data)
    scales = None
    if config is not None:
        scales = (config.r, config.lora_alpha, config.use_rslora, dict(config.rank_pattern), dict(config.alpha_pattern))
    hasher.update(repr((scales, dtype)).encode())
    return hasher.hexdigest()


@contextmanager
def _locked(staging: Path, target: Path) -> Generator[None]:
    """Hold the lock of a target inside the context; delete the lock file afterwards."""
    path = staging.with_suffix('.lock')
    with path.open('w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have deleted the file after it was opened here. In that case, the lock has no
            # effect.
            is_held = path.exists() and path.stat().st_ino == os.fstat(lock.fileno()).st_ino
        except (BlockingIOError, FileNotFoundError):
            is_held = False
        if not is_held:
            raise MergeRunning(str(target))
        try:
            yield
        finally:
            path.unlink()


def _has_digest(folder: Path, digest: str) -> bool:
    try:
        return json.loads((folder / MERGE_FILE).read_bytes())['digest'] == digest
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False


def _prepare(staging: Path, digest: str) -> None:
    """Keep the files of an interrupted run of the same merge; otherwise start with an empty folder."""
    if _has_digest(staging, digest):
        return
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    _write_json(staging / MERGE_FILE, {'digest': digest})


def _write(
    base: ModelFolder, changes: Mapping[str, WeightChange], staging: Path, *, dtype: str | None, report: Progress
) -> int:
    done = size_bytes = 0
    for shard in base.shards:
        entries = _output_entries(shard, dtype)
        size_bytes += sum(entry.size_bytes for entry in entries)
        if not (staging / shard.path.name).exists():
            for block_bytes in _write_shard(shard, entries, changes, staging / shard.path.name):
                done += block_bytes
                report(done, base.size_bytes)
        else:
            done += shard.size_bytes
            report(done, base.size_bytes)
    for file in base.companions:
        shutil.copyfile(file, staging / file.name)
    _write_json(staging / CONFIG_FILE, base.config_in(dtype))
    if base.is_indexed:
        weight_map = {entry.name: shard.path.name for shard in base.shards for entry in shard.entries}
        _write_json(staging / INDEX_FILE, {'metadata': {'total_size': size_bytes}, 'weight_map': weight_map})
    return size_bytes


def _output_entries(shard: Shard, dtype: str | None) -> list[TensorEntry]:
    """Return the entries of the shard in the output file."""
    entries: list[TensorEntry] = []
    offset = 0
    for entry in shard.entries:
        written = dtype if dtype is not None and entry.dtype in FLOAT_DTYPES else entry.dtype
        size = (entry.end - entry.begin) // DTYPE_BYTES[entry.dtype] * DTYPE_BYTES[written]
        entries.append(TensorEntry(entry.name, written, entry.shape, offset, size))
        offset += size
    return entries


def _write_shard(
    shard: Shard, entries: list[TensorEntry], changes: Mapping[str, WeightChange], target: Path
) -> Iterator[int]:
    """Write one file under a temporary name, sync it and rename it; yield the number of bytes of each block."""
    metadata = {name: value for name, value in shard.metadata.items() if name != 'format'}
    unfinished = target.with_suffix('.part')
    with shard.path.open('rb') as source, unfinished.open('wb') as file:
        file.write(build_header(entries, metadata=metadata))
        for read, written in zip(shard.entries, entries, strict=True):
            yield from _write_tensor(source, read, file, written.dtype, changes.get(read.name))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(target)


def _write_tensor(
    source: IO[bytes], read: FileEntry, file: IO[bytes], dtype: str, change: WeightChange | None
) -> Iterator[int]:
    row_count = read.shape[0] if read.shape else 1
    row_bytes = (read.end - read.begin) // row_count if row_count else 0
    widened = max(row_bytes // DTYPE_BYTES[read.dtype] * 4, 1)
    rows_at_once = max(1, _BLOCK_BYTES // widened)
    source.seek(read.begin)
    for begin in range(0, row_count, rows_at_once):
        count = min(rows_at_once, row_count - begin)
        data = source.read(count * row_bytes)
        if len(data) != count * row_bytes:
            raise InvalidModelFolder(Path(source.name).name, 'was truncated while it was being read')
        if change is not None:
            values = change.changed(to_float32(data, read.dtype).reshape(count, -1), begin)
            data = from_float32(values, dtype)
        elif dtype != read.dtype:
            data = from_float32(to_float32(data, read.dtype), dtype)
        file.write(data)
        yield count * row_bytes


def _publish(staging: Path, target: Path, digest: str, size_bytes: int) -> None:
    _write_json(staging / MERGE_FILE, {'digest': digest, 'size_bytes': size_bytes})
    _sync_folder(staging)
    replaced = staging.with_suffix('.replaced')
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    staging.rename(target)
    _sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open('w') as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ignore_progress(done: int, total: int) -> None:
    """Serve as the default of `on_progress`."""
