"""Two ways to send operations: one call each, or a stream of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import grpc

from twinkle.api.model.v1 import operation_pb2, operation_result_pb2, training_service_pb2
from twinkle.api.model.v1.training_service_pb2_grpc import TrainingServiceStub
from twinkle_client.errors import Error, ErrorFacts, RetryableError, error_from_status
from twinkle_client.model.uploads import BatchUploads
from twinkle_client.rpc import Connection, Patience

Operation = operation_pb2.Operation
OperationResult = operation_result_pb2.OperationResult

_GONE = 'UPLOAD_NOT_FOUND'
"""The batch of an operation expired, or went with a disk: the cure is to upload it again."""


class Carrier(Protocol):
    """Takes an operation to the service and brings its result."""

    is_stream: bool
    """Whether what was sent behind a refused operation fails with it; else it waits for the missing number."""

    async def send(self, operation: Operation) -> OperationResult:
        """Send, however often it takes; the service applies it once.

        Raises:
            Error: it failed or was refused.
        """
        ...


class CallCarrier:
    """One unary call for each operation."""

    is_stream = False

    def __init__(self, connection: Connection) -> None:
        """Send over `connection`."""
        self._connection = connection
        self._stub = TrainingServiceStub(connection.channel)
        self._uploads = BatchUploads(connection)

    async def send(self, operation: Operation) -> OperationResult:
        """See `Carrier`."""
        patience = self._connection.patience()
        while True:
            fitted = await self._uploads.fit(operation)
            request = training_service_pb2.ExecuteRequest(operation=fitted, is_waiting_allowed=True)
            try:
                return (await self._connection.unary(self._stub.Execute, request)).result
            except Error as error:
                if error.reason != _GONE:
                    raise
                await patience.wait_or_raise(error, may_retry=True)


@dataclass
class _Unanswered:
    """An operation on its way."""

    operation: Operation
    future: 'asyncio.Future[OperationResult]'
    patience: Patience | None = None
    """With answers that say to try again; from the first of them on."""


class StreamCarrier:
    """One stream for many operations: none waits for the one before to come back.

    A stream that breaks is opened again, for as long as the client is patient, and what was not answered
    is sent again in its order: the service answers what it has applied from its record.
    """

    is_stream = True

    def __init__(self, connection: Connection) -> None:
        """Open nothing yet."""
        self._connection = connection
        self._stub = TrainingServiceStub(connection.channel)
        self._uploads = BatchUploads(connection)
        self._unanswered: dict[int, _Unanswered] = {}
        self._outgoing: asyncio.Queue[Operation | None] = asyncio.Queue()
        self._retries: set[asyncio.Task[None]] = set()
        self._answer_count = 0
        self._task: asyncio.Task[None] | None = None

    async def send(self, operation: Operation) -> OperationResult:
        """See `Carrier`; operations are of one adapter and sent in the order of their numbers."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        entry = _Unanswered(operation, asyncio.get_running_loop().create_future())
        self._unanswered[operation.sequence_number] = entry
        self._outgoing.put_nowait(operation)
        return await entry.future

    async def close(self) -> None:
        """Wait for what is under way and end the stream."""
        if self._task is not None:
            self._outgoing.put_nowait(None)
            await self._task

    async def _run(self) -> None:
        patience = self._connection.patience()
        while True:
            before = self._answer_count
            try:
                await self._one_stream()
            except Error as error:
                if self._answer_count > before:
                    patience.renew()
                try:
                    await patience.wait_or_raise(error)
                except Error:
                    self._fail_all(error)
                    return
            else:
                return

    async def _one_stream(self) -> None:
        """Exchange operations for results until all are answered.

        Raises:
            Error: the stream ended before.
        """
        responses = self._connection.duplex(
            self._stub.Train, self._requests(), request_type=training_service_pb2.TrainRequest
        )
        async with aclosing(responses):
            async for response in responses:
                self._answer(response.result)
        if self._unanswered:
            text = 'the stream ended before every operation was answered'
            raise RetryableError(ErrorFacts(code=grpc.StatusCode.UNAVAILABLE, message=text))

    async def _requests(self) -> AsyncIterator[training_service_pb2.TrainRequest]:
        # Whatever waits in the queue is among the unanswered, too; those a broken stream took are only there.
        is_ending = self._empty_queue()
        for operation in [self._unanswered[number].operation for number in sorted(self._unanswered)]:
            if (request := await self._request(operation)) is not None:
                yield request
        if is_ending:
            self._outgoing.put_nowait(None)
        while (next_operation := await self._outgoing.get()) is not None:
            if (request := await self._request(next_operation)) is not None:
                yield request
        # The end must be told again if this stream breaks before everything is answered.
        self._outgoing.put_nowait(None)

    async def _request(self, operation: Operation) -> training_service_pb2.TrainRequest | None:
        """Return the request; None where its batch cannot be uploaded, which fails that operation alone."""
        entry = self._unanswered.get(operation.sequence_number)
        if entry is None:
            return None
        try:
            return training_service_pb2.TrainRequest(operation=await self._uploads.fit(operation))
        except Error as error:
            self._settle(entry, error)
            return None

    def _empty_queue(self) -> bool:
        """Empty the queue; return whether the end was in it."""
        is_ending = False
        while not self._outgoing.empty():
            is_ending = self._outgoing.get_nowait() is None or is_ending
        return is_ending

    def _answer(self, result: OperationResult) -> None:
        entry = self._unanswered.get(result.sequence_number)
        if entry is None:
            return
        if not result.HasField('error'):
            self._settle(entry, result)
            return
        error = error_from_status(result.error)
        if isinstance(error, RetryableError) or error.reason == _GONE:
            retry = asyncio.create_task(self._send_again(entry, error))
            self._retries.add(retry)
            retry.add_done_callback(self._retries.discard)
        else:
            self._settle(entry, error)

    async def _send_again(self, entry: _Unanswered, error: Error) -> None:
        entry.patience = entry.patience or self._connection.patience()
        try:
            await entry.patience.wait_or_raise(error, may_retry=True)
        except Error:
            self._settle(entry, error)
        else:
            self._outgoing.put_nowait(entry.operation)

    def _settle(self, entry: _Unanswered, outcome: OperationResult | Error) -> None:
        self._unanswered.pop(entry.operation.sequence_number, None)
        self._answer_count += 1
        if entry.future.done():
            return
        if isinstance(outcome, Error):
            entry.future.set_exception(outcome)
        else:
            entry.future.set_result(outcome)

    def _fail_all(self, error: Error) -> None:
        for entry in list(self._unanswered.values()):
            self._settle(entry, error)
