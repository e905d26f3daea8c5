"""Verified and resumable transfers of checkpoints as tar archives of peft folders."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
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
"""Callback with the number of transferred bytes and the total."""

_CONFIG_FILE, _WEIGHTS_FILE = 'adapter_config.json', 'adapter_model.safetensors'
_CHUNK_BYTES = 1 << 19
"""Chunk size of uploads, which every server accepts."""
_MAX_RESTARTS = 4
"""Maximum number of attempts to download an archive. Each replaced or damaged archive requires another attempt."""
_RESUMABLE = frozenset({'CHUNK_CORRUPT', 'IN_USE', 'STREAM_OUT_OF_ORDER'})
"""Reasons of errors after which the upload resumes from the offset that the server reports."""


def ignore_progress(done: int, total: int) -> None:
    """Ignore the progress. Transfers use this function if `report` is not given."""


class _ReplacedError(Exception):
    """The archive on the server differs from the partially downloaded archive."""


class ArchiveDownload:
    """Downloads a checkpoint into a folder; a partial download stays in hidden files until it is verified.

    Args:
        connection: Connection to the gateway.
        path: Path of the checkpoint.
        folder: Target folder; created if necessary.
        report: Callback with the number of received bytes and the total.
    """

    def __init__(
        self, connection: Connection, path: str, folder: Path, *, report: ReportBytes = ignore_progress
    ) -> None:
        self._connection = connection
        self._stub = CheckpointServiceStub(connection.channel)
        self._path = path
        self._archive = folder / '.download.tar'
        self._digest_file = folder / '.download.digest'
        self._report = report

    async def run(self) -> None:
        """Download the missing bytes, verify the digest and unpack the archive.

        Raises:
            Error: The checkpoint does not exist, or the server cannot be reached.
            ValueError: The archive was damaged or replaced repeatedly.
        """
        folder = self._archive.parent
        is_new = not await asyncio.to_thread(folder.exists)
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        try:
            await self._download()
        except Error:
            await asyncio.to_thread(self._discard_nothing, is_folder_new=is_new)
            raise

    async def _download(self) -> None:
        for _ in range(_MAX_RESTARTS):
            try:
                await receive_file(self._archive, self._chunks)
            except _ReplacedError:
                await asyncio.to_thread(self._discard)
                continue
            if await asyncio.to_thread(self._is_intact):
                await asyncio.to_thread(self._unpack)
                return
            await asyncio.to_thread(self._discard)
        raise ValueError(f'{self._path}: the archive was damaged or replaced {_MAX_RESTARTS} times; retry later')

    async def _chunks(self, offset: int) -> AsyncIterator[tensor_pb2.TensorChunk]:
        request = checkpoint_service_pb2.DownloadCheckpointRequest(checkpoint_path=self._path, offset=offset)
        try:
            async with aclosing(self._connection.stream(self._stub.DownloadCheckpoint, request)) as responses:
                async for response in responses:
                    await asyncio.to_thread(self._check, response)
                    self._report(response.chunk.offset + len(response.chunk.data), response.archive_size_bytes)
                    yield response.chunk
        except UsageError as error:
            if offset and error.reason == 'INVALID_FIELD':
                # The partial download is longer than the archive.
                raise _ReplacedError() from error
            raise

    def _check(self, response: checkpoint_service_pb2.DownloadCheckpointResponse) -> None:
        if response.archive_digest == self._saved_digest():
            return
        if response.chunk.offset:
            raise _ReplacedError()
        self._digest_file.write_text(response.archive_digest)

    def _is_intact(self) -> bool:
        digest = self._saved_digest()
        return not digest or blake3().update_mmap(self._archive).hexdigest() == digest

    def _saved_digest(self) -> str:
        return self._digest_file.read_text() if self._digest_file.exists() else ''

    def _discard(self) -> None:
        self._archive.unlink(missing_ok=True)
        self._digest_file.unlink(missing_ok=True)

    def _discard_nothing(self, *, is_folder_new: bool) -> None:
        """Remove an empty archive, and also its folder if this download created the folder."""
        if self._archive.exists() and not self._archive.stat().st_size:
            self._discard()
            if is_folder_new:
                with suppress(OSError):
                    self._archive.parent.rmdir()

    def _unpack(self) -> None:
        with tarfile.open(self._archive) as content:
            content.extractall(self._archive.parent, filter='data')
        self._discard()


@dataclass(frozen=True, kw_only=True)
class AdapterUpload:
    """A local adapter to upload as a checkpoint."""

    source: Path
    """Peft folder, or a `.tar` or `.tar.gz` archive of such a folder."""
    name: str
    base_model: str
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])


async def upload_adapter(
    connection: Connection, adapter: AdapterUpload, *, report: ReportBytes = ignore_progress
) -> checkpoint_pb2.Checkpoint:
    """Upload an adapter and return its checkpoint. An interrupted upload resumes when the call is repeated.

    Raises:
        ValueError: The source is not a peft folder with safetensors.
        Error: The upload was refused, or the server cannot be reached.
    """
    with _archived(adapter.source) as path:
        size_bytes = path.stat().st_size
        digest = await asyncio.to_thread(lambda: blake3().update_mmap(path).hexdigest())
        header = checkpoint_service_pb2.CheckpointUploadHeader(
            # The id is derived from the content, so that a repeated upload resumes or is already complete.
            upload_id=f'up-{digest[:40]}',
            name=adapter.name,
            base_model=adapter.base_model,
            size_bytes=size_bytes,
            user_metadata=adapter.user_metadata,
        )
        return await _send(connection, header, path, report)


async def _send(
    connection: Connection,
    header: checkpoint_service_pb2.CheckpointUploadHeader,
    path: Path,
    report: ReportBytes,
) -> checkpoint_pb2.Checkpoint:
    stub = CheckpointServiceStub(connection.channel)
    # A query is a stream that contains only the header; the server responds with the offset that it expects.
    committed, is_query = 0, True
    with connection.backoff() as backoff:
        while True:
            requests = _requests(header, None if is_query else path, committed, report)
            try:
                response = await connection.upload(
                    stub.UploadCheckpoint, requests, request_type=checkpoint_service_pb2.UploadCheckpointRequest
                )
            except Error as error:
                offset = _expected_offset(error)
                if offset is None or not is_query:
                    await backoff.wait_or_raise(error, may_retry=error.reason in _RESUMABLE)
                if offset is None:
                    is_query = True
                    continue
                if offset > committed:
                    backoff.reset()
                committed, is_query = offset, not is_query
                continue
            report(header.size_bytes, header.size_bytes)
            return response.checkpoint


def _expected_offset(error: Error) -> int | None:
    """Return the offset at which the server expects the upload to continue, or None if it does not report one."""
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
    """Provide a temporary archive of the folder `source` while the block runs, or `source` itself if it is a file."""
    if source.is_file():
        yield source
        return
    missing = [name for name in (_CONFIG_FILE, _WEIGHTS_FILE) if not (source / name).is_file()]
    if missing:
        raise ValueError(f'{source} is not a peft folder with safetensors: it lacks {", ".join(missing)}')
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
    """Add a file to an archive without time, owner or mode, so that equal files give equal archives."""
    info = tarfile.TarInfo(path.name)
    info.size = path.stat().st_size
    file.write(info.tobuf(tarfile.GNU_FORMAT))
    with path.open('rb') as content:
        while data := content.read(io.DEFAULT_BUFFER_SIZE * 16):
            file.write(data)
    file.write(bytes(-info.size % tarfile.BLOCKSIZE))
