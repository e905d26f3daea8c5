"""Fetches batches from the data service."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import grpc

from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import loader_service_pb2 as wire
from twinkle.api.data.v1.loader_service_pb2_grpc import LoaderServiceStub
from twinkle_services.kit.errors import Code, Disposition, DomainError, InvalidField, NotBuiltYet, ServiceUnreachable
from twinkle_services.kit.rpc.status import error_from_call
from twinkle_services.model.domain.errors import LoaderAtEnd
from twinkle_services.model.domain.loader_batch import BatchReference, LoadedBatch, LoaderCursor

MAX_BATCH_BYTES = 256 << 20
"""Maximum size of a batch in bytes, far above the size of a batch that the engine can compute at once."""
_THREAD_BYTES = 1 << 20
"""Batches of at least this size in bytes are serialized in a thread."""
_BATCH_TIMEOUT = timedelta(seconds=60)
"""Timeout for one batch, which usually takes milliseconds."""


class DataClient:
    """Implements `twinkle_services.model.domain.loader_batch.BatchSource`; acts on behalf of the current caller."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Initialize the client; the caller closes the channel."""
        self._stub = LoaderServiceStub(channel)

    async def load(self, reference: BatchReference) -> LoadedBatch:
        call = self._stub.StreamBatches(_requests(reference), timeout=_BATCH_TIMEOUT.total_seconds())
        try:
            async for response in call:
                if response.ByteSize() < _THREAD_BYTES:
                    return _loaded(reference, response)
                return await asyncio.to_thread(_loaded, reference, response)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from error
        finally:
            call.cancel()
        # The data service closed the stream without a response, because it is shutting down.
        raise ServiceUnreachable('data')


class NoDataService:
    """Refuses every batch; used if no data service is configured."""

    async def load(self, reference: BatchReference) -> LoadedBatch:
        del reference
        raise NotBuiltYet('a batch by loader without data_address in the configuration of the model service')


async def _requests(reference: BatchReference) -> AsyncIterator[wire.StreamBatchesRequest]:
    cursor = reference.cursor
    start = wire.StreamStart(
        loader_id=reference.loader_id,
        cursor=None if cursor is None else dataset_pb2.Cursor(consumed_rows=cursor.consumed_rows, state=cursor.state),
    )
    yield wire.StreamBatchesRequest(start=start)
    yield wire.StreamBatchesRequest(credits=1)


def _loaded(reference: BatchReference, response: wire.StreamBatchesResponse) -> LoadedBatch:
    if response.is_end:
        raise LoaderAtEnd(reference.loader_id, response.cursor.consumed_rows)
    return LoadedBatch(
        content=response.batch.SerializeToString(deterministic=True),
        next_cursor=LoaderCursor(consumed_rows=response.cursor.consumed_rows, state=response.cursor.state),
    )


def _error_of(error: grpc.aio.AioRpcError) -> DomainError:
    """Convert an error of a call to the data service to the error that the caller of the operation receives."""
    failure = error_from_call(error, service='data')
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and isinstance(failure, ServiceUnreachable):
        return InvalidField(
            'batch.loader', f'its batch has more than {MAX_BATCH_BYTES} bytes; use a smaller batch size'
        )
    if failure.code is Code.INVALID_ARGUMENT and failure.violations:
        return InvalidField(_field_in_operation(failure.violations[0].field), failure.violations[0].problem)
    if failure.code is Code.UNAUTHENTICATED:
        # The deployment's own token was refused, which is not the caller's mistake.
        return ServiceUnreachable('data')
    if failure.code is Code.INTERNAL or failure.disposition is Disposition.REFUSED or failure.retry_after is not None:
        return failure
    return ServiceUnreachable('data')


def _field_in_operation(field: str) -> str:
    """Return the field path in the operation for a field of StreamBatchesRequest; other paths stay unchanged."""
    part, dot, rest = field.partition('.')
    return f'batch.loader{dot}{rest}' if part == 'start' else field
