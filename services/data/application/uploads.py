"""Uploads of files, each received in one or several streams."""

from collections.abc import AsyncIterator

from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.errors import InvalidField, StreamOutOfOrder, UploadNotFound
from twinkle_services.kit.resumable_uploads import UploadStore
from twinkle_services.kit.upload_folder import UploadChunk, UploadHeader, UploadStatus


class Uploads:
    """Receives files of at most `limit_bytes` bytes."""

    def __init__(self, store: UploadStore, *, limit_bytes: int) -> None:
        self._store, self._limit_bytes = store, limit_bytes

    async def receive(self, caller: Caller, parts: AsyncIterator[UploadHeader | UploadChunk]) -> UploadStatus:
        """Receive a stream and return the upload's status. If the stream breaks, the received bytes stay stored.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            StreamOutOfOrder: The first message is not a header, or a later message is not a chunk that begins at the
                committed offset.
            InvalidField: The file is too large, a chunk exceeds the size in the header, or the header differs from that
                of an earlier stream.
            ChunkCorrupt: A chunk does not match its checksum.
            DigestMismatch: The complete file does not match the header's digest. The upload was removed.
            QuotaExceeded: The total size of the tenant's uploads is too large.
            InUse: Another stream is sending this upload.
            DiskFull, StoreUnavailable: The disk has too little space, or cannot be used at the moment.
        """
        require_scope(caller, 'data')
        header = await anext(parts, None)
        if not isinstance(header, UploadHeader):
            raise StreamOutOfOrder('a header')
        if header.size_bytes > self._limit_bytes:
            raise InvalidField('header.size_bytes', f'is {header.size_bytes}, must be at most {self._limit_bytes}')
        upload = await self._store.open(caller.tenant_id, header)
        try:
            async for part in parts:
                committed_bytes = upload.status.committed_bytes
                if not isinstance(part, UploadChunk) or part.offset != committed_bytes:
                    raise StreamOutOfOrder.at_byte(committed_bytes)
                await upload.add(part)
            if upload.status.is_complete:
                await upload.verify()
            return upload.status
        finally:
            await upload.close()

    async def get(self, caller: Caller, upload_id: str) -> UploadStatus:
        """Return the status of an upload.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            UploadNotFound: The tenant has no such upload.
            StoredDataDamaged, StoreUnavailable: The upload is damaged, or the disk cannot be used at the moment.
        """
        require_scope(caller, 'data')
        status = await self._store.find(caller.tenant_id, upload_id)
        if status is None:
            raise UploadNotFound(upload_id)
        return status
