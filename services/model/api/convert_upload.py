"""Converts batch uploads between messages and values."""

import re
from collections.abc import AsyncIterator

from services.kit.errors import ChunkCorrupt, InvalidField
from services.kit.rpc.fields import id_from_proto, not_negative
from services.kit.upload_folder import UploadChunk, UploadHeader, UploadStatus
from twinkle.api.model.v1 import training_service_pb2 as wire
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.checkpoint_engine import chunk_checksum

_DIGEST = re.compile(r'[0-9a-f]{64}')


async def upload_parts_from_proto(
    requests: AsyncIterator[wire.UploadBatchRequest],
) -> AsyncIterator[UploadHeader | UploadChunk]:
    """Yield the parts of an upload as they arrive.

    Raises:
        InvalidField: A part is empty or malformed.
        ChunkCorrupt: A chunk does not match its checksum.
    """
    async for request in requests:
        match request.WhichOneof('part'):
            case 'header':
                yield _header_from_proto(request.header)
            case 'chunk':
                yield _chunk_from_proto(request.chunk)
            case _:
                raise InvalidField('part', 'must be a header or a chunk')


def upload_to_proto(status: UploadStatus) -> wire.UploadBatchResponse:
    return wire.UploadBatchResponse(upload_id=status.header.upload_id, committed_bytes=status.committed_bytes)


def _header_from_proto(header: wire.BatchHeader) -> UploadHeader:
    if header.size_bytes < 1:
        raise InvalidField('header.size_bytes', f'must be at least 1, got {header.size_bytes}')
    if not _DIGEST.fullmatch(header.digest):
        raise InvalidField('header.digest', 'must be a blake3 digest of 64 hexadecimal characters in lower case')
    upload_id = id_from_proto(header.upload_id, 'header.upload_id')
    return UploadHeader(upload_id=upload_id, size_bytes=header.size_bytes, digest=header.digest)


def _chunk_from_proto(chunk: tensor_pb2.TensorChunk) -> UploadChunk:
    offset = not_negative(chunk.offset, 'chunk.offset')
    if not chunk.data:
        raise InvalidField('chunk.data', 'must not be empty')
    if chunk_checksum(chunk.data) != chunk.checksum:
        raise ChunkCorrupt(offset)
    return UploadChunk(offset=offset, data=chunk.data)
