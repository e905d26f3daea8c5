"""Resumable uploads on the local disk, for the services that receive large files in chunks.

Each upload is a folder with a header and a file of the bytes received so far. The file's size is the committed offset.
A stream that breaks, or a service that is killed, loses no committed byte. Writes are not synced: after a power failure
an upload may be damaged or missing, and the client sends it again. Uploads are temporary, and each service converts a
complete one to its durable form. The services check authorization, scopes and the order of messages in a stream.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2s
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from twinkle_services.kit.checksums import is_prefix_intact, write_prefix_sum
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.disk_space import check_free_space
from twinkle_services.kit.errors import (
    DigestMismatch,
    InUse,
    InvalidField,
    QuotaExceeded,
    StoreUnavailable,
    StreamOutOfOrder,
)
from twinkle_services.kit.store_threads import run_in_store_thread
from twinkle_services.kit.upload_folder import (
    BYTES_FILE,
    UploadChunk,
    UploadHeader,
    UploadStatus,
    append,
    create_folder,
    holds,
    intact_status,
    is_marked_verified,
    mark_verified,
    modified,
    remove_folder,
    remove_leftover,
    status_in,
    write_header,
)

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


@dataclass(frozen=True)
class UploadQuota:
    """A limit per tenant, and its name in QuotaExceeded."""

    name: str
    limit: int


@dataclass(frozen=True, kw_only=True)
class UploadRules:
    """The rules that differ between the stores of the services."""

    time_to_live: timedelta
    """Time after which an upload expires, counted from its last stream or read."""
    upload_quota: UploadQuota | None = None
    """Maximum number of uploads of a tenant; None for no limit."""
    byte_quota: UploadQuota | None = None
    """Maximum size of all uploads of a tenant, in bytes; None for no limit."""
    is_header_binding: bool = True
    """If True, later streams must repeat the first header, and its size counts for the quota as long as the upload
    exists. If False, each stream announces the size again, and only stored bytes count while no stream is open."""
    chunk_field: str = 'chunk.data'
    """Field path in the error about a chunk that exceeds the announced size."""


class UploadStore:
    """Stores the uploads of all tenants below one folder, which contains nothing else.

    Concurrency: any number of uploads may be open; each one has at most one stream.
    """

    def __init__(self, root: Path, *, clock: Clock, rules: UploadRules) -> None:
        """Open the store at `root`, including uploads of earlier runs; the first upload creates the folder."""
        self._root, self._clock, self._rules = root, clock, rules
        self._open: set[Path] = set()
        self._lock = threading.Lock()
        """Held while uploads are counted, created or removed, so that concurrent calls cannot exceed a quota."""

    async def open(self, tenant_id: str, header: UploadHeader) -> 'Upload':
        """Create an upload or continue an existing one. An upload with lost or changed bytes starts at byte 0 again.

        Raises:
            InUse: Another stream sends this upload.
            InvalidField: The header contradicts the first header, or the size is below the number of stored bytes.
            QuotaExceeded: The tenant has too many uploads or bytes.
            DiskFull, StoreUnavailable: The disk has too little space for the missing bytes, or cannot be used.
        """
        folder = self._folder(tenant_id, header.upload_id)
        if folder in self._open:
            raise InUse('upload', header.upload_id, 'another stream')
        self._open.add(folder)
        opening = asyncio.ensure_future(run_in_store_thread(self._find_or_create, folder, header))
        try:
            committed_bytes = await asyncio.shield(opening)
        except BaseException:
            # After a cancellation the thread is still running, and the upload stays in use until it returns.
            if opening.done():
                self.release(folder)
            else:
                opening.add_done_callback(lambda _: self.release(folder))
            raise
        return Upload(self, folder, header, committed_bytes, chunk_field=self._rules.chunk_field)

    async def find(self, tenant_id: str, upload_id: str, *, is_content_read: bool = False) -> UploadStatus | None:
        """Return the state of an upload; None if the tenant has no such upload.

        Raises:
            StoredDataDamaged: The header is damaged, bytes are missing, or, with `is_content_read`, bytes have changed.
            StoreUnavailable: The disk cannot be used.
        """
        folder = self._folder(tenant_id, upload_id)
        return await run_in_store_thread(intact_status, folder, upload_id, is_content_read=is_content_read)

    async def read(self, tenant_id: str, upload_id: str) -> bytes | None:
        """Return the bytes of an upload and restart its time to live; None if it is missing or incomplete.

        Raises:
            StoredDataDamaged, StoreUnavailable: See `find`.
        """
        return await run_in_store_thread(self._read, self._folder(tenant_id, upload_id), upload_id)

    async def counted_bytes(self, tenant_id: str) -> int:
        """Return the size of all uploads of a tenant, counted as for the quota of bytes.

        Raises:
            StoreUnavailable: The disk cannot be used.
        """
        return await run_in_store_thread(self._counted_bytes_below, self._root / _hash_of(tenant_id))

    async def discard_expired(self) -> None:
        """Remove the expired uploads of all tenants, and files of earlier layouts. An open upload does not expire.

        If the disk cannot be used, do nothing.
        """
        with suppress(StoreUnavailable):
            await run_in_store_thread(self._discard_expired)

    def touch(self, folder: Path) -> None:
        """Restart the time to live of the upload in `folder`, if it exists and its disk can be written."""
        now = self._clock.now().timestamp()
        with suppress(OSError):
            os.utime(folder / BYTES_FILE, (now, now))

    def release(self, folder: Path) -> None:
        """Allow another stream to open the upload in `folder`."""
        self._open.discard(folder)

    def remove(self, folder: Path) -> None:
        """Remove the upload in `folder`."""
        with self._lock:
            remove_folder(folder)

    def _find_or_create(self, folder: Path, header: UploadHeader) -> int:
        if not is_prefix_intact(folder / BYTES_FILE):
            remove_folder(folder)  # the sender sends the bytes again
        with self._lock:
            known = status_in(folder)
            if known is None:
                self._check_quotas(folder, header, is_new=True)
                check_free_space(folder, header.size_bytes)
                create_folder(folder, header)
                return 0
            self._check_header(header, known)
            check_free_space(folder, header.size_bytes - known.committed_bytes)
            if not self._rules.is_header_binding:
                self._check_quotas(folder, header, is_new=False)
                if header != known.header:
                    write_header(folder, header)
            self.touch(folder)
            return known.committed_bytes

    def _check_header(self, header: UploadHeader, known: UploadStatus) -> None:
        if self._rules.is_header_binding and header != known.header:
            names = ('size_bytes', 'digest', 'sha256')
            changed = next(name for name in names if getattr(header, name) != getattr(known.header, name))
            was = getattr(known.header, changed) or 'empty'
            problem = f'must be {was}, as in the first stream of this upload; other bytes need another upload_id'
            raise InvalidField(f'header.{changed}', problem)
        if header.size_bytes < known.committed_bytes:
            problem = f'must be at least {known.committed_bytes}, the number of stored bytes, got {header.size_bytes}'
            raise InvalidField('header.size_bytes', problem)

    def _counted_bytes_below(self, tenant_folder: Path) -> int:
        with self._lock:
            uploads = [known for folder in tenant_folder.glob('*') if (known := status_in(folder))]
            return sum(map(self._counted_bytes, uploads))

    def _check_quotas(self, folder: Path, header: UploadHeader, *, is_new: bool) -> None:
        others = [known for other in folder.parent.glob('*') if other != folder if (known := status_in(other))]
        quota = self._rules.byte_quota
        if quota is not None and sum(map(self._counted_bytes, others)) + header.size_bytes > quota.limit:
            raise QuotaExceeded(quota.name, quota.limit)
        quota = self._rules.upload_quota
        if quota is not None and is_new and len(others) >= quota.limit:
            raise QuotaExceeded(quota.name, quota.limit)

    def _counted_bytes(self, upload: UploadStatus) -> int:
        is_reserved = self._rules.is_header_binding or upload.path.parent in self._open
        return upload.header.size_bytes if is_reserved else upload.committed_bytes

    def _read(self, folder: Path, upload_id: str) -> bytes | None:
        status = intact_status(folder, upload_id, is_content_read=True)
        if status is None or not status.is_complete:
            return None
        with suppress(FileNotFoundError):  # the upload may have been removed in the meantime
            data = status.path.read_bytes()
            self.touch(folder)
            return data
        return None

    def _discard_expired(self) -> None:
        oldest = (self._clock.now() - self._rules.time_to_live).timestamp()
        with self._lock:
            for path in [*self._root.glob('*/*'), *self._root.glob('*')]:
                if path.is_file() or path.parent == self._root:
                    remove_leftover(path)
                elif path not in self._open and modified(path / BYTES_FILE) < oldest:
                    remove_folder(path)

    def _folder(self, tenant_id: str, upload_id: str) -> Path:
        # Callers choose the ids. Hashes are safe file names, and two tenants never share a folder.
        return self._root / _hash_of(tenant_id) / _hash_of(upload_id)


class Upload:
    """One upload, opened by one stream.

    Concurrency: one call at a time; `close` may follow a cancelled call.
    """

    def __init__(
        self, store: UploadStore, folder: Path, header: UploadHeader, committed_bytes: int, *, chunk_field: str
    ) -> None:
        self._store, self._folder, self._header = store, folder, header
        self._committed_bytes = committed_bytes
        self._chunk_field = chunk_field
        self._running: asyncio.Future[Any] | None = None
        self._has_new_bytes = False
        """Whether this stream stored bytes."""
        self._is_verified = False
        self._is_unchanged = False
        """Whether an earlier stream verified the complete upload and stored its checksum."""

    @property
    def status(self) -> UploadStatus:
        """The current state."""
        path = self._folder / BYTES_FILE
        return UploadStatus(header=self._header, committed_bytes=self._committed_bytes, path=path)

    def check(self, offset: int, size_bytes: int) -> None:
        """Check the position of a chunk.

        Raises:
            StreamOutOfOrder: The chunk leaves a gap after the committed offset.
            InvalidField: The chunk exceeds the announced size.
        """
        if offset > self._committed_bytes:
            raise StreamOutOfOrder.at_byte(self._committed_bytes)
        end = offset + size_bytes
        if end > self._header.size_bytes:
            problem = f'ends at byte {end}, but the header announced {self._header.size_bytes} bytes'
            raise InvalidField(self._chunk_field, problem)

    async def add(self, chunk: UploadChunk) -> None:
        """Store a chunk; bytes before the committed offset are skipped.

        Raises:
            StreamOutOfOrder, InvalidField: See `check`; nothing was stored.
            ChunkCorrupt: The chunk does not match a checksum; nothing was stored.
            InvalidField: The header has no digest, and skipped bytes differ from the stored ones; nothing was stored.
            StoreUnavailable: The disk cannot be used; nothing was stored.
        """
        self.check(chunk.offset, len(chunk.data))
        await self.run(self._store_new, chunk)
        self._committed_bytes = max(self._committed_bytes, chunk.offset + len(chunk.data))

    async def verify(self) -> None:
        """Check that a complete upload has the digests of its header; do nothing if the header has no digest.

        The bytes are read once: later streams with the same header rely on the checksum that `open` compares.

        Raises:
            DigestMismatch: A digest differs. The upload was removed.
            StoreUnavailable: The disk cannot be used.
        """
        try:
            await self.run(self._verify)
        except DigestMismatch:
            await self.discard()
            raise

    async def discard(self) -> None:
        """Remove the upload and its bytes."""
        await self.run(self._store.remove, self._folder)

    async def run(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Run a function in a thread and return its result. Use it for functions that access the upload's file.

        Cancellation: the function runs to completion, and `close` waits for it.

        Raises:
            StoreUnavailable: The disk cannot be used.
        """
        self._running = asyncio.ensure_future(run_in_store_thread(function, *args, **kwargs))
        return await asyncio.shield(self._running)

    async def close(self) -> None:
        """Allow another stream to continue the upload.

        Cancellation: the upload is still closed once the function of a cancelled call has returned.
        """
        await asyncio.shield(asyncio.ensure_future(self._close()))

    def _store_new(self, chunk: UploadChunk) -> None:
        chunk.check()
        path, repeated_bytes = self.status.path, self._committed_bytes - chunk.offset
        # Without a digest, nothing else would show that the upload id was used for other bytes before.
        is_comparison_needed = repeated_bytes and not self._header.has_digest
        if is_comparison_needed and not holds(path, chunk):
            problem = f'differs from the bytes that this upload has stored at offset {chunk.offset}'
            raise InvalidField(self._chunk_field, f'{problem}; upload other bytes under another upload_id')
        if new := memoryview(chunk.data)[repeated_bytes:]:
            self._has_new_bytes = True
            append(path, new)

    def _verify(self) -> None:
        self._is_unchanged = not self._has_new_bytes and is_marked_verified(self._folder, self._header)
        if not self._is_unchanged:
            self._header.check_digests(self.status.path)
            self._is_verified = True

    async def _close(self) -> None:
        try:
            if self._running is not None:
                await asyncio.wait([self._running])
        finally:
            await asyncio.to_thread(self._finish)
            self._store.release(self._folder)

    def _finish(self) -> None:
        if not self._is_unchanged:
            write_prefix_sum(self.status.path)
        if self._is_verified:
            # The mark follows the checksum, because streams that find it compare only the checksum.
            mark_verified(self._folder, self._header)
        self._store.touch(self._folder)


def _hash_of(identity: str) -> str:
    return blake2s(identity.encode(), digest_size=16).hexdigest()
