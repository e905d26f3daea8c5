"""Receives batches that are too large for one message, each in one or several streams, and reads them later."""

from collections.abc import AsyncIterator

from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.errors import StreamOutOfOrder, UploadNotFound
from twinkle_services.kit.resumable_uploads import UploadStore
from twinkle_services.kit.upload_folder import UploadChunk, UploadHeader, UploadStatus


class UploadBatch:
    """Receives uploads."""

    def __init__(self, uploads: UploadStore) -> None:
        self._uploads = uploads

    async def __call__(self, caller: Caller, parts: AsyncIterator[UploadHeader | UploadChunk]) -> UploadStatus:
        """Receive a stream and return the upload's status. If the stream breaks, the received bytes stay stored.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
            StreamOutOfOrder: The first message is not a header, or a chunk leaves a gap.
            InvalidField: A chunk exceeds the announced size, the header differs from an earlier stream's header, or an
                upload without a digest repeats an offset with other bytes.
            ChunkCorrupt: A chunk does not match its checksum.
            QuotaExceeded: The tenant has too many uploads, or their total size is too large.
            InUse: Another stream is sending this upload.
            DiskFull, StoreUnavailable: The disk has too little space or cannot be used.
            DigestMismatch: The complete upload does not match a digest of the header. The upload was removed.
        """
        require_scope(caller, 'train')
        header = await anext(parts, None)
        if not isinstance(header, UploadHeader):
            raise StreamOutOfOrder('a header')
        await self._uploads.discard_expired()
        upload = await self._uploads.open(caller.tenant_id, header)
        try:
            async for part in parts:
                if not isinstance(part, UploadChunk):
                    raise StreamOutOfOrder.at_byte(upload.status.committed_bytes)
                await upload.add(part)
            if upload.status.is_complete:
                await upload.verify()
            return upload.status
        finally:
            await upload.close()


class ReadUpload:
    """Reads complete uploads."""

    def __init__(self, uploads: UploadStore) -> None:
        self._uploads = uploads

    async def __call__(self, caller: Caller, upload_id: str) -> bytes:
        """Return the bytes of a complete upload, and restart its time to live.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
            UploadNotFound: The tenant has no such upload, or the upload is incomplete or expired.
            StoredDataDamaged: The stored bytes are damaged.
            StoreUnavailable: The disk cannot be used.
        """
        require_scope(caller, 'train')
        await self._uploads.discard_expired()
        data = await self._uploads.read(caller.tenant_id, upload_id)
        if data is None:
            raise UploadNotFound(upload_id)
        return data
