"""Checkpoints as archives of peft folders: down into a folder, and up from one, both verified and resumable."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from blake3 import blake3

from twinkle.api.checkpoint.v1 import checkpoint_pb2, checkpoint_service_pb2
from twinkle.api.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_client.errors import Error, UsageError
from twinkle_client.rpc import Connection
from twinkle_client.transfer import file_chunks, receive_file

ReportBytes = Callable[[int, int], None]
"""Told how many bytes have gone over the wire, of how many."""

_CONFIG_FILE, _WEIGHTS_FILE = 'adapter_config.json', 'adapter_model.safetensors'
_CHUNK_BYTES = 1 << 19
"""Of an upload: every server takes messages of that size."""
_MOST_BEGINNINGS = 4
"""Downloads of one archive that begin at byte 0: it may be replaced meanwhile, or come damaged."""
_RESUMABLE = frozenset({'CHUNK_CORRUPT', 'IN_USE', 'STREAM_OUT_OF_ORDER'})
"""Reasons after which asking where the upload stands, and going on, is the cure."""


def ignore_progress(done: int, total: int) -> None:
    """Report to nobody."""


class _ReplacedError(Exception):
    """The archive is not the one whose beginning is here."""


class ArchiveDownload:
    """Fetches one checkpoint into a folder. What has come stays there, hidden, until all of it is right."""

    def __init__(
        self, connection: Connection, path: str, folder: Path, *, report: ReportBytes = ignore_progress
    ) -> None:
        """Describe the download.

        Args:
            connection: to the gateway.
            path: of the checkpoint.
            folder: where its files go; made if need be.
            report: told how far it is.
        """
        self._connection = connection
        self._stub = CheckpointServiceStub(connection.channel)
        self._path = path
        self._archive = folder / '.download.tar'
        self._note = folder / '.download.digest'
        self._report = report

    async def run(self) -> None:
        """Fetch what is missing, compare the whole with its digest, and unpack it.

        Raises:
            Error: the checkpoint is not there, or the server cannot be reached.
            ValueError: it came damaged, or was replaced, again and again.
        """
        await asyncio.to_thread(self._archive.parent.mkdir, parents=True, exist_ok=True)
        for _ in range(_MOST_BEGINNINGS):
            try:
                await receive_file(self._archive, self._pieces)
            except _ReplacedError:
                await asyncio.to_thread(self._forget)
                continue
            if await asyncio.to_thread(self._is_right):
                await asyncio.to_thread(self._unpack)
                return
            await asyncio.to_thread(self._forget)
        raise ValueError(f'{self._path}: the archive came damaged, or was replaced, {_MOST_BEGINNINGS} times')

    async def _pieces(self, offset: int) -> AsyncIterator[tensor_pb2.TensorChunk]:
        request = checkpoint_service_pb2.DownloadCheckpointRequest(checkpoint_path=self._path, offset=offset)
        try:
            async with aclosing(self._connection.stream(self._stub.DownloadCheckpoint, request)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(self._check, piece)
                    self._report(piece.chunk.offset + len(piece.chunk.data), piece.archive_size_bytes)
                    yield piece.chunk
        except UsageError as error:
            if offset and error.reason == 'INVALID_FIELD':
                # What is here is longer than the archive.
                raise _ReplacedError() from error
            raise

    def _check(self, piece: checkpoint_service_pb2.DownloadCheckpointResponse) -> None:
        noted = self._note.read_text() if self._note.exists() else ''
        if piece.archive_digest == noted:
            return
        if piece.chunk.offset:
            raise _ReplacedError()
        self._note.write_text(piece.archive_digest)

    def _is_right(self) -> bool:
        digest = self._note.read_text() if self._note.exists() else ''
        return not digest or blake3().update_mmap(self._archive).hexdigest() == digest

    def _forget(self) -> None:
        self._archive.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def _unpack(self) -> None:
        with tarfile.open(self._archive) as content:
            content.extractall(self._archive.parent, filter='data')
        self._forget()


@dataclass(frozen=True, kw_only=True)
class UploadOrder:
    """An adapter of this machine that becomes a checkpoint."""

    source: Path
    """A peft folder, or an archive of one, `.tar` or `.tar.gz`."""
    name: str
    base_model: str
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])


async def upload_adapter(
    connection: Connection, order: UploadOrder, *, report: ReportBytes = ignore_progress
) -> checkpoint_pb2.Checkpoint:
    """Send an adapter and return the checkpoint it became; one that was cut goes on when it is called again.

    Raises:
        ValueError: the folder is no peft folder of safetensors.
        Error: it was refused, or the server cannot be reached.
    """
    with _archived(order.source) as path:
        size_bytes = path.stat().st_size
        digest = await asyncio.to_thread(lambda: blake3().update_mmap(path).hexdigest())
        header = checkpoint_service_pb2.CheckpointUploadHeader(
            # Named after its content, so that the same adapter again goes on, or is there already.
            upload_id=f'up-{digest[:40]}',
            name=order.name,
            base_model=order.base_model,
            size_bytes=size_bytes,
            user_metadata=order.user_metadata,
        )
        return await _send(connection, header, path, report)


async def _send(
    connection: Connection,
    header: checkpoint_service_pb2.CheckpointUploadHeader,
    path: Path,
    report: ReportBytes,
) -> checkpoint_pb2.Checkpoint:
    stub, patience = CheckpointServiceStub(connection.channel), connection.patience()
    held, is_asking = 0, True
    while True:
        # Asked first where the upload stands, by a stream without a byte.
        requests = _requests(header, None if is_asking else path, held, report)
        try:
            answer = await connection.upload(
                stub.UploadCheckpoint, requests, request_type=checkpoint_service_pb2.UploadCheckpointRequest
            )
        except Error as error:
            place = _place_of(error)
            if place is None or not is_asking:
                await patience.wait_or_raise(error, may_retry=error.reason in _RESUMABLE)
            if place is not None and place > held:
                patience.renew()
            held, is_asking = (place, not is_asking) if place is not None else (held, True)
            continue
        report(header.size_bytes, header.size_bytes)
        return answer.checkpoint


def _place_of(error: Error) -> int | None:
    """Return from which byte an upload goes on; None: the error does not say it."""
    offset = error.metadata.get('offset', '')
    return int(offset) if error.reason == 'STREAM_OUT_OF_ORDER' and offset.isdecimal() else None


async def _requests(
    header: checkpoint_service_pb2.CheckpointUploadHeader, path: Path | None, offset: int, report: ReportBytes
) -> AsyncIterator[checkpoint_service_pb2.UploadCheckpointRequest]:
    yield checkpoint_service_pb2.UploadCheckpointRequest(header=header)
    if path is None:
        return
    async for chunk in file_chunks(path, offset=offset, chunk_bytes=_CHUNK_BYTES):
        yield checkpoint_service_pb2.UploadCheckpointRequest(chunk=chunk)
        report(chunk.offset + len(chunk.data), header.size_bytes)


@contextmanager
def _archived(source: Path) -> Iterator[Path]:
    """Give the archive of a folder during the block; one that is an archive already is given as it is."""
    if source.is_file():
        yield source
        return
    missing = [name for name in (_CONFIG_FILE, _WEIGHTS_FILE) if not (source / name).is_file()]
    if missing:
        raise ValueError(f'{source} is no peft folder of safetensors: {", ".join(missing)} is missing')
    archive = source / '.upload.tar'
    try:
        with archive.open('wb') as file:
            for name in (_CONFIG_FILE, _WEIGHTS_FILE):
                _add(file, source / name)
            file.write(bytes(2 * tarfile.BLOCKSIZE))
        yield archive
    finally:
        archive.unlink(missing_ok=True)


def _add(file: IO[bytes], path: Path) -> None:
    """Write a file into an archive: equal files give equal bytes, whenever and wherever."""
    info = tarfile.TarInfo(path.name)
    info.size = path.stat().st_size
    file.write(info.tobuf(tarfile.GNU_FORMAT))
    with path.open('rb') as content:
        while data := content.read(io.DEFAULT_BUFFER_SIZE * 16):
            file.write(data)
    file.write(bytes(-info.size % tarfile.BLOCKSIZE))
