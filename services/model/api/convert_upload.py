"""Converts batch uploads between messages and values."""

from collections.abc import AsyncIterator

from twinkle.api.model.v1 import training_service_pb2 as wire
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import id_from_proto
from twinkle_services.kit.rpc.uploads import blake3_from_proto, sha256_from_proto, upload_chunk_from_proto
from twinkle_services.kit.upload_folder import UploadChunk, UploadHeader, UploadStatus


async def upload_parts_from_proto(
    requests: AsyncIterator[wire.UploadBatchRequest],
) -> AsyncIterator[UploadHeader | UploadChunk]:
    """Yield the parts of an upload as they arrive.

    Raises:
        InvalidField: A part is empty or malformed.
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
    return UploadHeader(
        upload_id=id_from_proto(header.upload_id, 'header.upload_id'),
        size_bytes=header.size_bytes,
        digest=blake3_from_proto(header.digest, 'header.digest'),
        sha256=sha256_from_proto(header.sha256, 'header.sha256'),
    )


def _chunk_from_proto(chunk: tensor_pb2.TensorChunk) -> UploadChunk:
    if not chunk.data:
        raise InvalidField('chunk.data', 'must not be empty')
    return upload_chunk_from_proto(chunk)
