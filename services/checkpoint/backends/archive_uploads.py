"""Stores unfinished archives in the kit's upload store, and opens complete ones as adapters."""

import asyncio
from datetime import timedelta
from pathlib import Path

from twinkle_services.checkpoint.backends.peft_archive import OpenAdapter, open_adapter
from twinkle_services.checkpoint.backends.pieces import StatePieceSource
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.resumable_uploads import Upload, UploadQuota, UploadRules, UploadStore
from twinkle_services.kit.upload_folder import UploadChunk, UploadHeader
from twinkle_services.kit.worker import Threads

MAX_UNFINISHED = 16
"""Maximum number of unfinished uploads of one tenant."""


class ArchiveUploads:
    """Implements the port `UploadStore`."""

    def __init__(
        self, folder: Path, threads: Threads, *, clock: Clock, time_to_live: timedelta, limit_bytes: int
    ) -> None:
        """Open the upload store in `folder`, which must contain only uploads.

        Args:
            folder: Folder of the uploads; created by the first upload.
            threads: Threads in which archives are opened and read.
            clock: Clock that determines which uploads have expired.
            time_to_live: Time after which an upload expires, counted from its last stream.
            limit_bytes: Maximum uncompressed size of an archive in bytes. It is also the maximum total size of the
                unfinished uploads of one tenant.
        """
        self._threads = threads
        self._limit_bytes = limit_bytes
        rules = UploadRules(
            time_to_live=time_to_live,
            upload_quota=UploadQuota('unfinished_uploads', MAX_UNFINISHED),
            byte_quota=UploadQuota('unfinished_upload_bytes', limit_bytes),
            is_header_binding=False,
            chunk_field='chunk',
        )
        self._store = UploadStore(folder, clock=clock, rules=rules)

    async def open(self, tenant_id: str, header: UploadHeader) -> 'ArchiveUpload':
        upload = await self._store.open(tenant_id, header)
        return ArchiveUpload(upload, self._threads, limit_bytes=self._limit_bytes)

    async def discard_expired(self) -> None:
        await self._store.discard_expired()


class ArchiveUpload:
    """Implements the port `Upload`."""

    def __init__(self, upload: Upload, threads: Threads, *, limit_bytes: int) -> None:
        self._upload = upload
        self._threads = threads
        self._limit_bytes = limit_bytes
        self._opened: OpenAdapter | None = None

    @property
    def received_bytes(self) -> int:
        return self._upload.status.committed_bytes

    async def add(self, chunk: UploadChunk) -> None:
        await self._upload.add(chunk)

    async def verify(self) -> None:
        await self._upload.verify()

    async def open_adapter(self, base_model: str) -> tuple[StatePieceSource, str]:
        opened = await self._upload.run(self._open_adapter, base_model)
        return opened.source, opened.stated_base_model

    async def discard(self) -> None:
        await self._upload.discard()

    async def close(self) -> None:
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await self._upload.close()
        # If the caller was cancelled while the archive was opened, nothing else closes the source.
        if self._opened is not None:
            await self._opened.source.close()

    def _open_adapter(self, base_model: str) -> OpenAdapter:
        path = self._upload.status.path
        self._opened = open_adapter(path, base_model, self._threads, limit_bytes=self._limit_bytes)
        return self._opened
