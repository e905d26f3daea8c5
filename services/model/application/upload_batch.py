"""Upload a batch that is too large for one message, over several streams if need be, and read it."""

from collections.abc import AsyncIterator

from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import InvalidField, StreamOutOfOrder, UploadNotFound
from services.model.domain.upload import Upload, UploadChunk, UploadHeader, UploadStatus, UploadStore


class UploadBatch:
    """Takes uploads."""

    def __init__(self, uploads: UploadStore) -> None:
        """Keep them in `uploads`."""
        self._uploads = uploads

    async def __call__(self, caller: Caller, parts: AsyncIterator[UploadHeader | UploadChunk]) -> UploadStatus:
        """Return where the upload stands at the end of the stream; what came before a cut is kept.

        Raises:
            ScopeMissing: the key may not train.
            StreamOutOfOrder: the header is not first, or a chunk leaves a gap.
            InvalidField: more came than the header says, or it says otherwise than when the upload began.
            QuotaExceeded: the tenant has too much lying here.
            InUse: another stream sends this upload.
            DigestMismatch: the whole is not what the header says; nothing was kept.
        """
        require_scope(caller, 'train')
        header = await anext(parts, None)
        if not isinstance(header, UploadHeader):
            raise StreamOutOfOrder('a header')
        upload = await self._uploads.open(caller.tenant_id, header)
        try:
            async for part in parts:
                await _add(upload, header, part)
            if upload.committed_bytes == header.size_bytes:
                await upload.verify()
            return UploadStatus(upload_id=header.upload_id, committed_bytes=upload.committed_bytes)
        finally:
            await upload.close()


class ReadUpload:
    """Gives back what was uploaded."""

    def __init__(self, uploads: UploadStore) -> None:
        """Look in `uploads`."""
        self._uploads = uploads

    async def __call__(self, caller: Caller, upload_id: str) -> bytes:
        """Return the bytes of a finished upload, which begins its time to live anew.

        Raises:
            ScopeMissing: the key may not train.
            UploadNotFound: there is none of the caller's that is complete.
        """
        require_scope(caller, 'train')
        data = await self._uploads.read(caller.tenant_id, upload_id)
        if data is None:
            raise UploadNotFound(upload_id)
        return data


async def _add(upload: Upload, header: UploadHeader, part: UploadHeader | UploadChunk) -> None:
    committed = upload.committed_bytes
    if not isinstance(part, UploadChunk) or part.offset > committed:
        raise StreamOutOfOrder.at_byte(committed)
    end = part.offset + len(part.data)
    if end > header.size_bytes:
        raise InvalidField('chunk.data', f'ends at byte {end}, the header said {header.size_bytes} bytes in all')
    if end > committed:
        # What came before is not taken twice: a sender may resume further back than it must.
        await upload.add(part.data[committed - part.offset :])
