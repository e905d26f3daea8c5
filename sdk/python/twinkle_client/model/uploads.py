"""Uploads of batches that are too large for one message; the operation then refers to the upload."""

from collections.abc import AsyncIterator
from typing import Any

from blake3 import blake3

from twinkle.api.model.v1 import operation_pb2, training_service_pb2
from twinkle.api.model.v1.training_service_pb2_grpc import TrainingServiceStub
from twinkle.api.server.v1 import server_service_pb2
from twinkle.api.server.v1.server_service_pb2_grpc import ServerServiceStub
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_client.errors import Error
from twinkle_client.rpc import Connection
from twinkle_client.transfer import CHUNK_BYTES, checksum

Operation = operation_pb2.Operation
_SAFE_MESSAGE_BYTES = 1 << 20
"""Size in bytes that every server accepts."""
_ENVELOPE_BYTES = 1 << 10
"""Upper bound for the bytes that the request adds to an operation."""
_RESUMABLE = frozenset({'CHUNK_CORRUPT', 'IN_USE', 'STREAM_OUT_OF_ORDER'})
"""Reasons of errors after which the upload resumes from the offset that the server reports."""


class BatchUploads:
    """Uploads the batches of operations that do not fit into one message.

    Concurrency: call the methods on the clients' event loop.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._training = TrainingServiceStub(connection.channel)
        self._server = ServerServiceStub(connection.channel)
        self._limit: int | None = None

    async def fit(self, operation: Operation) -> Operation:
        """Upload the features of an operation that does not fit into one message; return the operation to send.

        An operation that fits, or that has no features, is returned unchanged.

        Raises:
            Error: The upload failed or was refused.
        """
        size = operation.ByteSize() + _ENVELOPE_BYTES
        if size <= _SAFE_MESSAGE_BYTES or size <= await self._message_limit():
            return operation
        name = str(operation.WhichOneof('verb'))
        verb: Any = getattr(operation, name)
        if not hasattr(verb, 'batch') or verb.batch.WhichOneof('source') != 'features':
            return operation
        features = verb.batch.features.SerializeToString(deterministic=True)
        upload_id = await self._upload(features, adapter_id=operation.adapter_id)
        fitted = Operation(adapter_id=operation.adapter_id, sequence_number=operation.sequence_number)
        fitted_verb = getattr(fitted, name)
        for field, value in verb.ListFields():
            # The batch may be large, so it is not copied.
            if field.name != 'batch':
                getattr(fitted_verb, field.name).CopyFrom(value)
        fitted_verb.batch.upload_id = upload_id
        return fitted

    async def _message_limit(self) -> int:
        if self._limit is None:
            request = server_service_pb2.GetServerInfoRequest()
            info = await self._connection.unary(self._server.GetServerInfo, request)
            hops = [item for item in info.services if item.service in ('gateway', 'model') and item.is_reachable]
            limits = [item.limits.message_bytes for item in hops if item.limits.message_bytes]
            if len(hops) < len({'gateway', 'model'}):
                # A restarting service reports no limit, so the result is not cached.
                return min(limits, default=_SAFE_MESSAGE_BYTES)
            self._limit = min(limits, default=_SAFE_MESSAGE_BYTES)
        return self._limit

    async def _upload(self, data: bytes, *, adapter_id: str) -> str:
        digest = blake3(data).hexdigest()
        # The id is derived from the content, so that an equal batch is uploaded once.
        header = training_service_pb2.BatchHeader(
            upload_id=f'up-{digest[:40]}', size_bytes=len(data), digest=digest, adapter_id=adapter_id
        )
        # The first stream contains only the header; the response reports the bytes that earlier attempts have uploaded.
        committed, is_query = 0, True
        with self._connection.backoff() as backoff:
            while committed < len(data):
                requests = _requests(header, b'' if is_query else data, begin=committed)
                try:
                    response = await self._connection.upload(
                        self._training.UploadBatch, requests, request_type=training_service_pb2.UploadBatchRequest
                    )
                except Error as error:
                    await backoff.wait_or_raise(error, may_retry=error.reason in _RESUMABLE)
                    is_query = True
                    continue
                if response.committed_bytes > committed:
                    backoff.reset()
                committed, is_query = response.committed_bytes, False
        return header.upload_id


async def _requests(
    header: training_service_pb2.BatchHeader, data: bytes, *, begin: int
) -> AsyncIterator[training_service_pb2.UploadBatchRequest]:
    yield training_service_pb2.UploadBatchRequest(header=header)
    for offset in range(begin, len(data), CHUNK_BYTES):
        piece = data[offset : offset + CHUNK_BYTES]
        chunk = tensor_pb2.TensorChunk(offset=offset, data=piece, checksum=checksum(piece))
        yield training_service_pb2.UploadBatchRequest(chunk=chunk)
