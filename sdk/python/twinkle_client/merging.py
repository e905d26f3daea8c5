"""Downloads of checkpoints as model folders or GGUF files, merged into the base model on this machine.

Files appear under their names when they are complete. Unfinished files are in hidden folders beside the target, from
which a repeated call continues.
"""

import asyncio
import importlib
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from twinkle.api.checkpoint.v1 import checkpoint_pb2
from twinkle.checkpoint_engine import (
    MERGE_FILE,
    MODEL_FILE,
    OUTPUT_DTYPES,
    WEIGHTS_FILES,
    export_merged,
    parse_header,
    read_peft_folder,
)
from twinkle.checkpoint_engine.hf_folder import ModelFolder
from twinkle.data_format import LoraConfig, TensorData
from twinkle.hub import HubError, resolve_model
from twinkle.hub.progress import Report
from twinkle_client.archives import ArchiveDownload
from twinkle_client.rpc import Connection

_SPARE_BYTES = 64 << 20
"""Free space that must remain after a download."""
_FLOAT_BYTES: Mapping[str, int] = {'bfloat16': 2, 'float16': 2, 'float32': 4}


class MergedDownload:
    """Downloads a checkpoint and merges it into its base model.

    Args:
        connection: Connection to the gateway.
        checkpoint: The checkpoint.
        base: Id or folder of the base model. Empty: the base model that the checkpoint names.
        dtype: Data type of the weights; in a GGUF file, it can be 'q8_0'. None: the type of the base model.
        report: Callback with the progress of both stages.
    """

    def __init__(
        self,
        connection: Connection,
        checkpoint: checkpoint_pb2.Checkpoint,
        *,
        base: str,
        dtype: str | None,
        report: Report,
    ) -> None:
        self._connection = connection
        self._checkpoint = checkpoint
        self._base = base
        self._dtype = dtype
        self._report = report
        self._cancelled = threading.Event()

    async def run(self, folder: Path) -> None:
        """Write the merged model to `folder`, replacing an earlier merged model.

        Raises:
            ValueError: The base model is missing or has quantized weights, `dtype` is unknown, the folder has other
                content, or the checkpoint does not fit the base model.
            OSError: The disk has too little space, or failed.
            Error: The checkpoint does not exist, or the server cannot be reached.
        """
        self._check_dtype(OUTPUT_DTYPES)
        with self._cancelling():
            await asyncio.to_thread(_check_folder, folder)
            base = await asyncio.to_thread(self._base_folder)
            size_bytes = await asyncio.to_thread(_size_bytes, base, self._dtype) + self._checkpoint.size_bytes
            await asyncio.to_thread(_make_parent, folder, size_bytes)
            await self._download_and_merge(base, folder, dtype=self._dtype)

    async def run_gguf(self, file: Path) -> None:
        """Write the merged model to a GGUF file, replacing an existing file.

        Raises:
            ValueError: The base model is missing, has quantized weights, or cannot be converted, `dtype` is unknown,
                `gguf` is not installed, or the checkpoint does not fit the base model.
            OSError: The disk has too little space, or failed.
            Error: The checkpoint does not exist, or the server cannot be reached.
        """
        library, folder = _gguf_library(), file.parent / f'.{file.name}.merged'
        self._check_dtype(library.GGUF_DTYPES)
        dtype = self._dtype if self._dtype in OUTPUT_DTYPES else None
        with self._cancelling():
            await asyncio.to_thread(_check_file, file)
            await asyncio.to_thread(_check_folder, folder)
            base = await asyncio.to_thread(self._base_folder)
            # The base model has the architecture and the tokenizer of the result.
            planned = await asyncio.to_thread(library.GgufModel, base, dtype=self._dtype)
            merged_bytes = await asyncio.to_thread(_size_bytes, base, dtype)
            # The checkpoint is removed before the file is written.
            size_bytes = merged_bytes + max(self._checkpoint.size_bytes, planned.size_bytes)
            await asyncio.to_thread(_make_parent, folder, size_bytes)
            await self._download_and_merge(base, folder, dtype=dtype)
            model = await asyncio.to_thread(library.GgufModel, folder, dtype=self._dtype, name=file.stem)
            await asyncio.to_thread(model.write, file, self._stage('converting'))
            await asyncio.to_thread(shutil.rmtree, folder)

    @contextmanager
    def _cancelling(self) -> Iterator[None]:
        """End the work of threads when the call is cancelled, because the program would wait for them at exit."""
        try:
            yield
        except asyncio.CancelledError:
            self._cancelled.set()
            raise

    async def _download_and_merge(self, base: Path, folder: Path, *, dtype: str | None) -> None:
        adapter = folder.parent / f'.{folder.name}.adapter'
        await asyncio.to_thread(_remove_weights, adapter)
        report = self._stage('downloading the checkpoint')
        await ArchiveDownload(self._connection, self._checkpoint.path, adapter, report=report).run()
        await asyncio.to_thread(self._merge, base, adapter, folder, dtype=dtype)

    def _check_dtype(self, known: Collection[str]) -> None:
        if self._dtype is not None and self._dtype not in known:
            raise ValueError(f'dtype must be one of {", ".join(known)}, got {self._dtype!r}')

    def _base_folder(self) -> Path:
        """Return the folder of the base model, which is downloaded if it is not on this machine."""
        name = self._base or self._checkpoint.base_model
        try:
            return resolve_model(name)
        except HubError as error:
            raise ValueError(
                f'the base model {name} is not available on this machine: {error}. '
                'Name its folder with --base (in Python: base=)'
            ) from error

    def _merge(self, base: Path, adapter: Path, folder: Path, *, dtype: str | None) -> None:
        tensors, config = _read(adapter)
        export_merged(base, tensors, config, folder, dtype=dtype, on_progress=self._stage('merging'))
        shutil.rmtree(adapter)

    def _stage(self, name: str) -> Callable[[int, int], None]:
        """Return the callback of one stage; in a thread, it ends the work of a cancelled call."""

        def report(done: int, total: int) -> None:
            if self._cancelled.is_set():
                raise InterruptedError(f'{name} was cancelled')
            self._report(name, done=done, total=total)

        return report


def ignore_stages(stage: str, *, done: float, total: float) -> None:
    """Ignore the progress. Downloads use this function if `report` is not given."""


def _gguf_library() -> Any:
    """Return the module that writes GGUF files. It is imported only here, because the client alone lacks `gguf`."""
    try:
        return importlib.import_module('twinkle.checkpoint_engine.gguf_file')
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install 'twinkle-grpc[data]'") from error


def _check_folder(folder: Path) -> None:
    if folder.exists() and not (folder / MERGE_FILE).exists() and (folder.is_file() or any(folder.iterdir())):
        raise ValueError(f'{folder} exists and is not a merged model; choose another folder')


def _check_file(file: Path) -> None:
    if file.is_dir():
        raise ValueError(f'{file} is a folder; name a file')


def _make_parent(folder: Path, size_bytes: int) -> None:
    """Create the folder above a target, and check that its disk has space for `size_bytes`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free_bytes, needed_bytes = shutil.disk_usage(folder.parent).free, size_bytes + _SPARE_BYTES
    if free_bytes < needed_bytes:
        raise OSError(
            f'{folder.parent} has {free_bytes >> 20} MiB of free space, but {needed_bytes >> 20} MiB are needed'
        )


def _size_bytes(base: Path, dtype: str | None) -> int:
    """Return the size of the base model's tensors in a data type; None for their own types."""
    folder = ModelFolder.open(base)
    if dtype is None:
        return folder.size_bytes
    return sum(_FLOAT_BYTES[dtype] * prod(entry.shape) for entry in folder.entries.values())


def _remove_weights(folder: Path) -> None:
    """Remove the unpacked files of an earlier call, which may belong to another checkpoint."""
    for name in WEIGHTS_FILES:
        (folder / name).unlink(missing_ok=True)


def _read(folder: Path) -> tuple[Mapping[str, TensorData], LoraConfig | None]:
    """Read a downloaded checkpoint. Full weights stay on the disk until they are used."""
    path = folder / MODEL_FILE
    if not path.exists():
        return read_peft_folder(folder)
    data = np.memmap(path, mode='r').data
    entries, _ = parse_header(data)
    return {entry.name: TensorData(entry.dtype, entry.shape, data[entry.begin : entry.end]) for entry in entries}, None
