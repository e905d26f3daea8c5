"""Upload a file, over several streams if need be."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.data.ports import Upload, UploadStore
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import InvalidField, StreamOutOfOrder, UploadNotFound


@dataclass(frozen=True)
class UploadHeader:
    """Announces an upload."""

    upload_id: str
    size_bytes: int


@dataclass(frozen=True)
class UploadChunk:
    """The next bytes; their checksum has been checked."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class UploadStatus:
    """Where an upload stands."""

    upload_id: str
    committed_bytes: int
    is_complete: bool


class UploadFile:
    """Takes uploads."""

    def __init__(self, uploads: UploadStore, *, limit_bytes: int) -> None:
        """Take files of at most `limit_bytes`."""
        self._uploads, self._limit_bytes = uploads, limit_bytes

    async def __call__(self, caller: Caller, parts: AsyncIterator[UploadHeader | UploadChunk]) -> UploadStatus:
        """Return where the upload stands at the end of the stream; what came before a cut is kept.

        Raises:
            ScopeMissing: the key may not.
            StreamOutOfOrder: the header is not first, or a chunk does not follow what is kept.
            InvalidField: the file is too large, or longer than the header says.
            InUse: another stream sends this upload.
        """
        require_scope(caller, 'data')
        header = await anext(parts, None)
        if not isinstance(header, UploadHeader):
            raise StreamOutOfOrder('a header')
        if header.size_bytes > self._limit_bytes:
            raise InvalidField('header.size_bytes', f'is {header.size_bytes}, at most {self._limit_bytes} are taken')
        upload = await self._uploads.open(caller.tenant_id, header.upload_id, size_bytes=header.size_bytes)
        try:
            async for part in parts:
                await _add(upload, part)
        finally:
            await upload.close()
        return _status(upload)


class GetUpload:
    """Says where to resume."""

    def __init__(self, uploads: UploadStore) -> None:
        """Look in `uploads`."""
        self._uploads = uploads

    async def __call__(self, caller: Caller, upload_id: str) -> UploadStatus:
        """Return where the upload stands.

        Raises:
            ScopeMissing: the key may not.
            UploadNotFound: not the caller's.
        """
        require_scope(caller, 'data')
        upload = await self._uploads.find(caller.tenant_id, upload_id)
        if upload is None:
            raise UploadNotFound(upload_id)
        return _status(upload)


async def _add(upload: Upload, part: UploadHeader | UploadChunk) -> None:
    if not isinstance(part, UploadChunk) or part.offset != upload.committed_bytes:
        raise StreamOutOfOrder.at_byte(upload.committed_bytes)
    end = part.offset + len(part.data)
    if end > upload.size_bytes:
        raise InvalidField('chunk.data', f'ends at byte {end}, the header said {upload.size_bytes} bytes in all')
    await upload.add(part.data)


def _status(upload: Upload) -> UploadStatus:
    is_complete = upload.committed_bytes == upload.size_bytes
    return UploadStatus(upload.upload_id, upload.committed_bytes, is_complete)
