"""Uploads as growing files on this machine, and the adapter inside a finished one.

An archive is data from outside: nothing of it is unpacked to a disk. The two files of a peft
folder are found inside it, checked, and read where they lie.
"""

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import blake2s
from pathlib import Path
from typing import IO

from blake3 import blake3

from services.checkpoint.backends.checked_chunks import domain_errors
from services.checkpoint.backends.pieces import Piece, StatePieceSource
from services.kit.errors import ChunkCorrupt, InUse, InvalidField, StreamOutOfOrder
from services.kit.worker import Threads
from twinkle.checkpoint_engine import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_MODEL_FILE,
    CHUNK_BYTES,
    SEED_KEY,
    FileEntry,
    StateChunk,
    TensorEntry,
    WeightManifest,
    chunk_checksum,
    import_adapter,
    parse_header,
)

_CONFIG_LIMIT_BYTES = 1 << 20
_HEADER_LIMIT_BYTES = 64 << 20


class UploadFiles:
    """Keeps one file for each upload."""

    def __init__(self, folder: Path, threads: Threads) -> None:
        """Keep them in `folder`, which is made when the first one comes."""
        self._folder = folder
        self._threads = threads
        self._open: set[Path] = set()

    async def open(self, tenant_id: str, upload_id: str, *, size_bytes: int) -> 'UploadFile':
        """Open an upload, new or begun; see the port."""
        # A digest is a file name whatever the ids hold, and cannot be guessed into another tenant's.
        path = self._folder / blake2s(f'{tenant_id}\0{upload_id}'.encode()).hexdigest()
        if path in self._open:
            raise InUse('upload', upload_id, 'another stream')
        self._open.add(path)
        try:
            file = await self._threads.run(_open_to_append, path)
        except BaseException:
            self._open.discard(path)
            raise
        upload = UploadFile(path, file, size_bytes, threads=self._threads, open_paths=self._open)
        if upload.held_bytes > size_bytes:
            await upload.close()
            raise InvalidField('header.size_bytes', f'is {size_bytes}, {upload.held_bytes} bytes came before')
        return upload

    async def discard_older(self, moment: datetime) -> None:
        """Forget the uploads that nothing was added to since `moment`."""
        await self._threads.run(self._discard_older, moment.timestamp())

    def _discard_older(self, moment_seconds: float) -> None:
        for path in self._folder.glob('*'):
            with suppress(FileNotFoundError):  # finished since it was listed
                if path not in self._open and path.stat().st_mtime < moment_seconds:
                    path.unlink()


class UploadFile:
    """One upload. What the file holds is what has come."""

    def __init__(
        self, path: Path, file: IO[bytes], size_bytes: int, *, threads: Threads, open_paths: set[Path]
    ) -> None:
        """Go on with the file at `path`."""
        self._path = path
        self._file = file
        self._size_bytes = size_bytes
        self._threads = threads
        self._open_paths = open_paths
        self._held_bytes = file.tell()

    @property
    def held_bytes(self) -> int:
        """How many bytes have come."""
        return self._held_bytes

    async def add(self, chunk: StateChunk) -> None:
        """Take a chunk; see the port."""
        end = chunk.offset + len(chunk.data)
        if chunk.offset > self._held_bytes:
            raise StreamOutOfOrder(f'a chunk at byte {self._held_bytes}')
        if end > self._size_bytes:
            raise InvalidField('chunk', f'ends at byte {end} of an archive of {self._size_bytes}')
        await self._threads.run(self._add, chunk)
        self._held_bytes = max(end, self._held_bytes)

    async def open_adapter(self, base_model: str) -> StatePieceSource:
        """Open the adapter inside the archive; see the port."""
        return await self._threads.run(self._open_adapter, base_model)

    async def discard(self) -> None:
        """Forget the upload and its bytes."""
        await self._threads.run(self._path.unlink, missing_ok=True)

    async def close(self) -> None:
        """Let go of the upload."""
        await self._threads.run(self._file.close)
        self._open_paths.discard(self._path)

    def _add(self, chunk: StateChunk) -> None:
        if chunk_checksum(chunk.data) != chunk.checksum:
            raise ChunkCorrupt(chunk.offset)
        self._file.write(memoryview(chunk.data)[self._held_bytes - chunk.offset :])
        self._file.flush()

    def _open_adapter(self, base_model: str) -> StatePieceSource:
        file = self._path.open('rb')
        try:
            with _invalid_archive():
                config_place, model_place = _find_files(file)
                entries, metadata, header_bytes = _read_model_header(file, *model_place)
                seed = metadata.get(SEED_KEY)
                config_data = _read(file, *config_place, limit_bytes=_CONFIG_LIMIT_BYTES)
                shapes = {entry.name: entry.shape for entry in entries}
                adapter = import_adapter(config_data, shapes, seed=None if seed is None else int(seed))
                begin, size_bytes = model_place[0] + header_bytes, model_place[1] - header_bytes
                tensors = tuple(_entry(entry, adapter.names[entry.name], header_bytes) for entry in entries)
                digest = _digest(file, begin, size_bytes)
                manifest = WeightManifest(base_model, adapter.config, tensors, size_bytes, digest)
        except BaseException:
            file.close()
            raise
        return StatePieceSource(manifest, [Piece(size_bytes, file, begin)], self._threads)


def _open_to_append(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open('ab')
    file.seek(0, 2)
    return file


@contextmanager
def _invalid_archive() -> Iterator[None]:
    """Tell what is wrong with an archive as a fault of the request."""
    try:
        with domain_errors():
            yield
    except (ValueError, tarfile.TarError, EOFError, OverflowError) as error:
        raise InvalidField('chunk', f'the archive is no peft folder of safetensors: {error}') from error


def _find_files(file: IO[bytes]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the configuration and the weights lie in the archive: first byte and size."""
    places: dict[str, tuple[int, int]] = {}
    with tarfile.open(fileobj=file, mode='r:') as archive:
        for member in archive:
            name = member.name.rpartition('/')[2]
            if name not in {ADAPTER_CONFIG_FILE, ADAPTER_MODEL_FILE}:
                continue
            if not member.isreg() or member.issparse() or name in places:
                raise ValueError(f'{name} is there twice or is no plain file')
            places[name] = (member.offset_data, member.size)
    for name in (ADAPTER_CONFIG_FILE, ADAPTER_MODEL_FILE):
        if name not in places:
            raise ValueError(f'{name} is missing')
    return places[ADAPTER_CONFIG_FILE], places[ADAPTER_MODEL_FILE]


def _read_model_header(file: IO[bytes], begin: int, size_bytes: int) -> tuple[list[FileEntry], dict[str, str], int]:
    """Return the tensors of the weights' file, its metadata, and where in it the tensors begin."""
    length = int.from_bytes(_read(file, begin, min(8, size_bytes), limit_bytes=8), 'little')
    header_bytes = min(8 + length, size_bytes)
    header = _read(file, begin, header_bytes, limit_bytes=_HEADER_LIMIT_BYTES)
    entries, metadata = parse_header(header, file_bytes=size_bytes)
    return entries, metadata, header_bytes


def _read(file: IO[bytes], begin: int, size_bytes: int, *, limit_bytes: int) -> bytes:
    if size_bytes > limit_bytes:
        raise ValueError(f'a part of {size_bytes} bytes is larger than {limit_bytes}')
    file.seek(begin)
    data = file.read(size_bytes)
    if len(data) != size_bytes:
        raise ValueError('the archive is cut off')
    return data


def _entry(entry: FileEntry, name: str, header_bytes: int) -> TensorEntry:
    return TensorEntry(name, entry.dtype, entry.shape, entry.begin - header_bytes, entry.end - entry.begin)


def _digest(file: IO[bytes], begin: int, size_bytes: int) -> str:
    hasher = blake3()
    for offset in range(0, size_bytes, CHUNK_BYTES):
        length = min(CHUNK_BYTES, size_bytes - offset)
        hasher.update(_read(file, begin + offset, length, limit_bytes=CHUNK_BYTES))
    return hasher.hexdigest()
