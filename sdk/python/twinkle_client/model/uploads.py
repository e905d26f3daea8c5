"""Batches that are too large for one message: uploaded first, and named in the operation."""

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
_SURELY_TAKEN = 1 << 20
"""Bytes of a message that no server's limit is asked for."""
_ENVELOPE_BYTES = 1 << 10
"""What the request around an operation may add."""
_RESUMABLE = frozenset({'CHUNK_CORRUPT', 'IN_USE', 'STREAM_OUT_OF_ORDER'})
"""Reasons after which asking where the upload stands, and going on, is the cure."""


class BatchUploads:
    """Makes operations fit into messages. Lives on the connection's loop."""

    def __init__(self, connection: Connection) -> None:
        """Upload over `connection`."""
        self._connection = connection
        self._training = TrainingServiceStub(connection.channel)
        self._server = ServerServiceStub(connection.channel)
        self._limit: int | None = None

    async def fit(self, operation: Operation) -> Operation:
        """Return an operation with the same content that the server takes in one message.

        Raises:
            Error: the upload failed or was refused.
        """
        size = operation.ByteSize() + _ENVELOPE_BYTES
        if size <= _SURELY_TAKEN or size <= await self._message_limit():
            return operation
        name = str(operation.WhichOneof('verb'))
        verb: Any = getattr(operation, name)
        if not hasattr(verb, 'batch') or verb.batch.WhichOneof('source') != 'features':
            return operation
        features = verb.batch.features.SerializeToString(deterministic=True)
        upload_id = await self._upload(features, adapter_id=operation.adapter_id)
        fitted = Operation(adapter_id=operation.adapter_id, sequence_number=operation.sequence_number)
        getattr(fitted, name).options.CopyFrom(verb.options)
        getattr(fitted, name).batch.upload_id = upload_id
        return fitted

    async def _message_limit(self) -> int:
        if self._limit is None:
            request = server_service_pb2.GetServerInfoRequest()
            info = await self._connection.unary(self._server.GetServerInfo, request)
            on_the_way = [item for item in info.services if item.service in ('gateway', 'model') and item.is_reachable]
            limits = [item.limits.message_bytes for item in on_the_way if item.limits.message_bytes]
            if len(on_the_way) < len({'gateway', 'model'}):
                # A service that is being restarted says nothing of itself now; ask again next time.
                return min(limits, default=_SURELY_TAKEN)
            self._limit = min(limits, default=_SURELY_TAKEN)
        return self._limit

    async def _upload(self, data: bytes, *, adapter_id: str) -> str:
        digest = blake3(data).hexdigest()
        # Named after its content, so that the same batch again is there already.
        header = training_service_pb2.BatchHeader(
            upload_id=f'up-{digest[:40]}', size_bytes=len(data), digest=digest, adapter_id=adapter_id
        )
        patience = self._connection.patience()
        committed, is_asking = 0, True
        while committed < len(data):
            requests = _requests(header, b'' if is_asking else data, begin=committed)
            try:
                response = await self._connection.upload(
                    self._training.UploadBatch, requests, request_type=training_service_pb2.UploadBatchRequest
                )
            except Error as error:
                await patience.wait_or_raise(error, may_retry=error.reason in _RESUMABLE)
                is_asking = True
                continue
            if response.committed_bytes > committed:
                patience.renew()
            committed, is_asking = response.committed_bytes, False
        return header.upload_id


async def _requests(
    header: training_service_pb2.BatchHeader, data: bytes, *, begin: int
) -> AsyncIterator[training_service_pb2.UploadBatchRequest]:
    yield training_service_pb2.UploadBatchRequest(header=header)
    for offset in range(begin, len(data), CHUNK_BYTES):
        piece = data[offset : offset + CHUNK_BYTES]
        chunk = tensor_pb2.TensorChunk(offset=offset, data=piece, checksum=checksum(piece))
        yield training_service_pb2.UploadBatchRequest(chunk=chunk)
