"""Two ways to send operations: one call each, or a stream of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Protocol

from twinkle.api.model.v1 import operation_pb2, operation_result_pb2, training_service_pb2
from twinkle.api.model.v1.training_service_pb2_grpc import TrainingServiceStub
from twinkle_client.errors import Error, RetryableError, error_from_status
from twinkle_client.rpc import Connection
from twinkle_client.transfer import MAX_FAILURES

Operation = operation_pb2.Operation
OperationResult = operation_result_pb2.OperationResult


class Carrier(Protocol):
    """Takes an operation to the service and brings its result."""

    async def send(self, operation: Operation) -> OperationResult:
        """Send, however often it takes; the service applies it once.

        Raises:
            Error: it failed or was refused.
        """
        ...


class CallCarrier:
    """One unary call for each operation."""

    def __init__(self, connection: Connection) -> None:
        """Send over `connection`."""
        self._connection = connection
        self._stub = TrainingServiceStub(connection.channel)

    async def send(self, operation: Operation) -> OperationResult:
        """See `Carrier`."""
        request = training_service_pb2.ExecuteRequest(operation=operation, is_waiting_allowed=True)
        return (await self._connection.unary(self._stub.Execute, request)).result


class StreamCarrier:
    """One stream for many operations: none waits for the one before to come back.

    A stream that breaks is opened again, and what was not answered is sent again in its order.
    """

    def __init__(self, connection: Connection) -> None:
        """Open nothing yet."""
        self._connection = connection
        self._stub = TrainingServiceStub(connection.channel)
        self._unanswered: dict[int, tuple[Operation, asyncio.Future[OperationResult]]] = {}
        self._outgoing: asyncio.Queue[Operation | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def send(self, operation: Operation) -> OperationResult:
        """See `Carrier`; operations are of one adapter and sent in the order of their numbers."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        future: asyncio.Future[OperationResult] = asyncio.get_running_loop().create_future()
        self._unanswered[operation.sequence_number] = (operation, future)
        self._outgoing.put_nowait(operation)
        return await future

    async def close(self) -> None:
        """Wait for what is under way and end the stream."""
        if self._task is not None:
            self._outgoing.put_nowait(None)
            await self._task

    async def _run(self) -> None:
        failures = 0
        while True:
            before = len(self._unanswered)
            try:
                return await self._one_stream()
            except RetryableError as error:
                failures = failures + 1 if len(self._unanswered) >= before else 0
                if failures == MAX_FAILURES:
                    self._fail_all(error)
                    return None
                await asyncio.sleep(error.retry_after.total_seconds() if error.retry_after else 0.5)
            except Error as error:
                self._fail_all(error)
                return None

    async def _one_stream(self) -> None:
        responses = self._connection.duplex(
            self._stub.Train, self._requests(), request_type=training_service_pb2.TrainRequest
        )
        async with aclosing(responses):
            async for response in responses:
                self._answer(response.result)

    async def _requests(self) -> AsyncIterator[training_service_pb2.TrainRequest]:
        # Whatever waits in the queue is among the unanswered, too; those a broken stream took are only there.
        is_ending = self._empty_queue()
        for operation, _ in [self._unanswered[number] for number in sorted(self._unanswered)]:
            yield training_service_pb2.TrainRequest(operation=operation)
        if is_ending:
            self._outgoing.put_nowait(None)
        while (next_operation := await self._outgoing.get()) is not None:
            yield training_service_pb2.TrainRequest(operation=next_operation)
        # The end must be told again if this stream breaks before everything is answered.
        self._outgoing.put_nowait(None)

    def _empty_queue(self) -> bool:
        """Empty the queue; return whether the end was in it."""
        is_ending = False
        while not self._outgoing.empty():
            is_ending = self._outgoing.get_nowait() is None or is_ending
        return is_ending

    def _answer(self, result: OperationResult) -> None:
        _, future = self._unanswered.pop(result.sequence_number, (None, None))
        if future is None or future.done():
            return
        if result.HasField('error'):
            future.set_exception(error_from_status(result.error))
        else:
            future.set_result(result)

    def _fail_all(self, error: Error) -> None:
        waiting, self._unanswered = self._unanswered, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(error)
