"""The data service as the source of batches that the client has never seen."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import grpc

from services.kit.errors import Code, DomainError, InvalidField, NotBuiltYet, ServiceUnreachable
from services.kit.rpc.status import error_from_call
from services.model.domain.errors import LoaderAtEnd
from services.model.domain.loader_batch import BatchReference, LoadedBatch, LoaderCursor
from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import loader_service_pb2 as wire
from twinkle.api.data.v1.loader_service_pb2_grpc import LoaderServiceStub

MOST_BYTES = 256 << 20
"""Of one batch: more than the engine computes on at once, by far."""
_THREAD_BYTES = 1 << 20
"""Larger batches are serialised beside the event loop."""
_PATIENCE = timedelta(seconds=60)
"""For one batch, which takes milliseconds."""
_PASSED_ON = frozenset({Code.NOT_FOUND, Code.INVALID_ARGUMENT, Code.PERMISSION_DENIED, Code.INTERNAL})
"""What is not mended by trying again later."""


class DataClient:
    """Implements `services.model.domain.loader_batch.BatchSource`; acts for the current caller."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Use a channel of `services.kit.rpc.channel.open_channel`; it stays the caller's to close."""
        self._stub = LoaderServiceStub(channel)

    async def load(self, reference: BatchReference) -> LoadedBatch:
        """Return the batch at a reference; see the port."""
        call = self._stub.StreamBatches(_requests(reference), timeout=_PATIENCE.total_seconds())
        try:
            async for response in call:
                if response.ByteSize() < _THREAD_BYTES:
                    return _loaded(reference, response)
                return await asyncio.to_thread(_loaded, reference, response)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error) from error
        finally:
            call.cancel()
        # The service ended the stream without a word: it is stopping.
        raise ServiceUnreachable('data')


class NoDataService:
    """Refuses batches of loaders, where the configuration names no data service."""

    async def load(self, reference: BatchReference) -> LoadedBatch:
        """Refuse; see the port."""
        del reference
        raise NotBuiltYet('a batch by loader, where data_address of the model service is empty,')


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
    """Return what a failure means to whoever named the loader."""
    fact = error_from_call(error, service='data')
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and isinstance(fact, ServiceUnreachable):
        return InvalidField(
            'batch.loader', f'its batch has more than {MOST_BYTES} bytes; open a loader of smaller ones'
        )
    if fact.code is Code.INVALID_ARGUMENT and fact.violations:
        return InvalidField(_field_here(fact.violations[0].field), fact.violations[0].problem)
    if fact.code in _PASSED_ON or fact.retry_after is not None:
        return fact
    return ServiceUnreachable('data')


def _field_here(field: str) -> str:
    """Return what the data service calls 'start.cursor' as the operation calls it; rows of the dataset stay so."""
    part, dot, rest = field.partition('.')
    return f'batch.loader{dot}{rest}' if part == 'start' else field
