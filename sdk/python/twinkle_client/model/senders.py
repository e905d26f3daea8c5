"""Two ways to send operations: a unary call for each, or one stream for many."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import grpc

from twinkle.api.model.v1 import operation_pb2, operation_result_pb2, training_service_pb2
from twinkle.api.model.v1.training_service_pb2_grpc import TrainingServiceStub
from twinkle_client.errors import Error, ErrorFacts, RetryableError, error_from_status
from twinkle_client.model.uploads import BatchUploads
from twinkle_client.rpc import Backoff, Connection

Operation = operation_pb2.Operation
OperationResult = operation_result_pb2.OperationResult

_UPLOAD_LOST = 'UPLOAD_NOT_FOUND'
"""Reason of the error for a batch whose upload expired or was lost. The client uploads the batch again."""


class OperationSender(Protocol):
    """Sends operations to the model service and returns their results."""

    is_stream: bool
    """Whether a refused operation fails the operations sent after it; otherwise they wait for its number."""

    async def send(self, operation: Operation) -> OperationResult:
        """Send an operation and return its result.

        The operation may be sent several times; the service applies it once.

        Raises:
            Error: The operation failed or was refused.
        """
        ...


class UnarySender:
    """Sends each operation as a unary call."""

    is_stream = False

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = TrainingServiceStub(connection.channel)
        self._uploads = BatchUploads(connection)

    async def send(self, operation: Operation) -> OperationResult:
        with self._connection.backoff() as backoff:
            while True:
                fitted = await self._uploads.fit(operation)
                request = training_service_pb2.ExecuteRequest(operation=fitted, is_waiting_allowed=True)
                try:
                    return (await self._connection.unary(self._stub.Execute, request)).result
                except Error as error:
                    if error.reason != _UPLOAD_LOST:
                        raise
                    await backoff.wait_or_raise(error, may_retry=True)


@dataclass
class _PendingOperation:
    """An operation without a result yet."""

    operation: Operation
    future: 'asyncio.Future[OperationResult]'
    backoff: Backoff | None = None
    """Backoff between retryable results; None before the first such result."""


class StreamSender:
    """Sends operations on one stream, without waiting for the results of earlier operations.

    A broken stream is reopened until the connection's retry timeout has passed, and pending operations are resent in
    order. The service answers an operation that it has already applied with the recorded result.
    """

    is_stream = True

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = TrainingServiceStub(connection.channel)
        self._uploads = BatchUploads(connection)
        self._pending: dict[int, _PendingOperation] = {}
        self._outgoing: asyncio.Queue[Operation | None] = asyncio.Queue()
        self._retries: set[asyncio.Task[None]] = set()
        self._backoff: Backoff | None = None
        """Backoff between streams; None before the first stream."""
        self._task: asyncio.Task[None] | None = None

    async def send(self, operation: Operation) -> OperationResult:
        """Send an operation. All operations belong to one adapter and are passed in the order of their numbers."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        entry = _PendingOperation(operation, asyncio.get_running_loop().create_future())
        self._pending[operation.sequence_number] = entry
        self._outgoing.put_nowait(operation)
        return await entry.future

    async def close(self) -> None:
        """Wait for all results and end the stream."""
        if self._task is not None:
            self._outgoing.put_nowait(None)
            await self._task

    async def _run(self) -> None:
        with self._connection.backoff() as self._backoff:
            while True:
                try:
                    await self._one_stream()
                except Error as error:
                    try:
                        await self._backoff.wait_or_raise(error)
                    except Error:
                        self._fail_all(error)
                        return
                else:
                    return

    async def _one_stream(self) -> None:
        """Exchange operations and results on one stream until all results have arrived.

        Raises:
            Error: The stream ended early.
        """
        responses = self._connection.duplex(
            self._stub.Train, self._requests(), request_type=training_service_pb2.TrainRequest
        )
        async with aclosing(responses):
            async for response in responses:
                self._handle_result(response.result)
        if self._pending:
            text = 'the stream ended before all results arrived'
            raise RetryableError(ErrorFacts(code=grpc.StatusCode.UNAVAILABLE, message=text))

    async def _requests(self) -> AsyncGenerator[training_service_pb2.TrainRequest]:
        # `_pending` contains the queued operations, and operations that a broken stream took from the queue.
        is_ending = self._empty_queue()
        for operation in [self._pending[number].operation for number in sorted(self._pending)]:
            if (request := await self._request(operation)) is not None:
                yield request
        if is_ending:
            self._outgoing.put_nowait(None)
        while (next_operation := await self._outgoing.get()) is not None:
            if (request := await self._request(next_operation)) is not None:
                yield request
        # If this stream breaks before all results arrive, the next stream has to end, too.
        self._outgoing.put_nowait(None)

    async def _request(self, operation: Operation) -> training_service_pb2.TrainRequest | None:
        """Return the request, or None if the operation already has a result. A failed upload is such a result."""
        entry = self._pending.get(operation.sequence_number)
        if entry is None:
            return None
        try:
            return training_service_pb2.TrainRequest(operation=await self._uploads.fit(operation))
        except Error as error:
            self._complete(entry, error)
            return None

    def _empty_queue(self) -> bool:
        """Discard the queue; return whether it contained the end marker."""
        is_ending = False
        while not self._outgoing.empty():
            is_ending = self._outgoing.get_nowait() is None or is_ending
        return is_ending

    def _handle_result(self, result: OperationResult) -> None:
        entry = self._pending.get(result.sequence_number)
        if entry is None:
            return
        if not result.HasField('error'):
            self._complete(entry, result)
            return
        error = error_from_status(result.error)
        if isinstance(error, RetryableError) or error.reason == _UPLOAD_LOST:
            retry = asyncio.create_task(self._send_again(entry, error))
            self._retries.add(retry)
            retry.add_done_callback(self._retries.discard)
        else:
            self._complete(entry, error)

    async def _send_again(self, entry: _PendingOperation, error: Error) -> None:
        entry.backoff = entry.backoff or self._connection.backoff()
        try:
            await entry.backoff.wait_or_raise(error, may_retry=True)
        except Error:
            self._complete(entry, error)
        else:
            self._outgoing.put_nowait(entry.operation)

    def _complete(self, entry: _PendingOperation, outcome: OperationResult | Error) -> None:
        self._pending.pop(entry.operation.sequence_number, None)
        for backoff in (self._backoff, entry.backoff):
            if backoff is not None:
                backoff.reset()
        if entry.future.done():
            return
        if isinstance(outcome, Error):
            entry.future.set_exception(outcome)
        else:
            entry.future.set_result(outcome)

    def _fail_all(self, error: Error) -> None:
        for entry in list(self._pending.values()):
            self._complete(entry, error)
