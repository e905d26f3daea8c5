"""Uploads as growing files on this machine."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from hashlib import blake2s
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

from services.checkpoint.backends.peft_archive import OpenAdapter, open_adapter, plain_path
from services.checkpoint.backends.pieces import StatePieceSource
from services.kit.errors import ChunkCorrupt, InUse, InvalidField, QuotaExceeded, StreamOutOfOrder
from services.kit.worker import Threads
from twinkle.checkpoint_engine import StateChunk, chunk_checksum

MOST_UNFINISHED = 16
"""Uploads of one tenant that are not whole."""
_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


class UploadFiles:
    """Keeps one file for each upload."""

    def __init__(self, folder: Path, threads: Threads, *, plain_limit_bytes: int) -> None:
        """Keep them in `folder`, which is made when the first one comes.

        Args:
            folder: holds nothing else.
            threads: do what touches the disk.
            plain_limit_bytes: most bytes that a compressed archive may have uncompressed, and that the uploads of one
                tenant that are not whole may have together.
        """
        self._folder = folder
        self._threads = threads
        self._plain_limit_bytes = plain_limit_bytes
        self._open: dict[Path, int] = {}

    async def open(self, tenant_id: str, upload_id: str, *, size_bytes: int) -> 'UploadFile':
        """Open an upload, new or begun; see the port."""
        # A digest is a file name whatever the ids hold, and cannot be guessed into another tenant's.
        tenant = blake2s(tenant_id.encode(), digest_size=16).hexdigest()
        path = self._folder / f'{tenant}-{blake2s(upload_id.encode()).hexdigest()}'
        if path in self._open:
            raise InUse('upload', upload_id, 'another stream')
        others = dict(self._open)
        self._open[path] = size_bytes
        limit_bytes = self._plain_limit_bytes - size_bytes
        opening = asyncio.ensure_future(self._threads.run(self._open_to_append, path, tenant, others, limit_bytes))
        try:
            file = await asyncio.shield(opening)
        except BaseException:
            # Its thread goes on where the caller has gone: the file is let go of when it is there.
            if opening.done():
                self._abandon(path, opening)
            else:
                opening.add_done_callback(lambda done: self._abandon(path, done))
            raise
        upload = UploadFile(
            path,
            file,
            size_bytes,
            threads=self._threads,
            plain_limit_bytes=self._plain_limit_bytes,
            on_close=lambda: self._let_go(path),
        )
        if upload.held_bytes > size_bytes:
            await upload.close()
            raise InvalidField('header.size_bytes', f'is {size_bytes}, {upload.held_bytes} bytes came before')
        return upload

    def _abandon(self, path: Path, opening: 'asyncio.Future[IO[bytes]]') -> None:
        self._let_go(path)
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()

    def _let_go(self, path: Path) -> None:
        self._open.pop(path, None)

    def _open_to_append(self, path: Path, tenant: str, others: Mapping[Path, int], limit_bytes: int) -> IO[bytes]:
        """Open a file where the tenant's `others` and those that nobody sends leave room for it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        held = {other: size for other, size in others.items() if other.name.startswith(f'{tenant}-')}
        for other in path.parent.glob(f'{tenant}-*'):
            # What is unpacked goes with its upload.
            if other not in {path, *held} and not other.suffix:
                with suppress(FileNotFoundError):  # whole since it was listed
                    held[other] = other.stat().st_size
        if not path.exists() and len(held) >= MOST_UNFINISHED:
            raise QuotaExceeded('unfinished_uploads', MOST_UNFINISHED)
        if sum(held.values()) > limit_bytes:
            raise QuotaExceeded('unfinished_upload_bytes', self._plain_limit_bytes)
        file = path.open('ab')
        file.seek(0, 2)
        return file

    async def discard_older(self, moment: datetime) -> None:
        """Forget the uploads that nothing was added to since `moment`."""
        await self._threads.run(self._discard_older, moment.timestamp())

    def _discard_older(self, moment_seconds: float) -> None:
        for path in self._folder.glob('*'):
            with suppress(FileNotFoundError):  # finished since it was listed
                if path.with_suffix('') not in self._open and path.stat().st_mtime < moment_seconds:
                    path.unlink()


class UploadFile:
    """One upload. What the file holds is what has come."""

    def __init__(
        self,
        path: Path,
        file: IO[bytes],
        size_bytes: int,
        *,
        threads: Threads,
        plain_limit_bytes: int,
        on_close: Callable[[], None],
    ) -> None:
        """Go on with the file at `path`."""
        self._path = path
        self._file = file
        self._size_bytes = size_bytes
        self._threads = threads
        self._plain_limit_bytes = plain_limit_bytes
        self._on_close = on_close
        self._held_bytes = file.tell()
        self._running: asyncio.Future[Any] | None = None
        self._opened: OpenAdapter | None = None

    @property
    def held_bytes(self) -> int:
        """How many bytes have come."""
        return self._held_bytes

    async def add(self, chunk: StateChunk) -> None:
        """Take a chunk; see the port."""
        end = chunk.offset + len(chunk.data)
        if chunk.offset > self._held_bytes:
            raise StreamOutOfOrder.at_byte(self._held_bytes)
        if end > self._size_bytes:
            raise InvalidField('chunk', f'ends at byte {end} of an archive of {self._size_bytes}')
        await self._run(self._add, chunk)
        self._held_bytes = max(end, self._held_bytes)

    async def open_adapter(self, base_model: str) -> tuple[StatePieceSource, str]:
        """Open the adapter inside the archive; see the port."""
        opened = await self._run(self._open_adapter, base_model)
        return opened.source, opened.stated_base_model

    async def discard(self) -> None:
        """Forget the upload and its bytes."""
        await self._run(self._path.unlink, missing_ok=True)

    async def close(self) -> None:
        """Let go of the upload, which goes on to its end where the caller is cancelled."""
        await asyncio.shield(asyncio.ensure_future(self._let_go()))

    async def _let_go(self) -> None:
        try:
            if self._running is not None:
                await asyncio.gather(self._running, return_exceptions=True)
            if self._opened is not None:
                await self._opened.source.close()
            await self._threads.run(self._close)
        finally:
            self._on_close()

    async def _run(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Run in a thread, which goes on where the caller is cancelled, and which letting go waits for."""
        running = asyncio.ensure_future(self._threads.run(function, *args, **kwargs))
        self._running = running
        return await asyncio.shield(running)

    def _open_adapter(self, base_model: str) -> OpenAdapter:
        limit_bytes = self._plain_limit_bytes
        self._opened = open_adapter(self._path, base_model, self._threads, limit_bytes=limit_bytes)
        return self._opened

    def _close(self) -> None:
        self._file.close()
        plain_path(self._path).unlink(missing_ok=True)

    def _add(self, chunk: StateChunk) -> None:
        if chunk_checksum(chunk.data) != chunk.checksum:
            raise ChunkCorrupt(chunk.offset)
        self._file.write(memoryview(chunk.data)[self._held_bytes - chunk.offset :])
        self._file.flush()
