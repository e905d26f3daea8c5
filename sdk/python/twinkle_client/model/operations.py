"""The operations of one adapter: numbered in the order in which they start, each applied once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import grpc

from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_config_pb2, training_service_pb2
from twinkle.api.model.v1.adapter_service_pb2_grpc import AdapterServiceStub
from twinkle.api.model.v1.training_service_pb2_grpc import TrainingServiceStub
from twinkle_client.errors import Disposition, Error, NotFoundError
from twinkle_client.model.queue_status import queue_status_shown
from twinkle_client.model.senders import OperationResult, OperationSender, UnarySender
from twinkle_client.rpc import Connection

_NUMBER_CONFLICTS = frozenset({'SEQUENCE_GAP', 'SEQUENCE_REUSED'})
"""Reasons of errors that show that the service expects a different number."""


class Run(Protocol):
    """Runs one operation."""

    async def __call__(self, **verb: Any) -> OperationResult:
        """Send an operation; see `OperationLog.run`."""
        ...


class OperationLog:
    """Numbers and sends an adapter's operations.

    Operations are numbered in the order in which they start. The number of a refused operation is used again. If the
    client cannot tell whether a number was used, it queries the service before it assigns the next number. On a
    stream, a refused operation fails all operations started after it.

    Args:
        connection: Connection to the gateway.
        adapter_id: Id of the adapter.
        last_number: Number of the last operation that the service has applied.

    Concurrency: call the methods on the clients' event loop.
    """

    def __init__(self, connection: Connection, adapter_id: str, *, last_number: int) -> None:
        self.sender: OperationSender = UnarySender(connection)
        self._connection = connection
        self._adapter_id = adapter_id
        self._training = TrainingServiceStub(connection.channel)
        self._adapters = AdapterServiceStub(connection.channel)
        self._last_number = last_number
        self._in_doubt: set[int] = set()
        self._is_stale = False
        self._pending_count = 0
        self._is_idle = asyncio.Event()
        # The lock is fair and is acquired without a pause when it is free, so numbers follow the order of starts.
        self._number_lock = asyncio.Lock()

    async def run(self, **verb: Any) -> OperationResult:
        """Send an operation and return its result.

        Args:
            verb: One keyword argument: a field of the oneof `Operation.verb` and its message.

        Raises:
            Error: The operation failed or was refused.
        """
        async with self._number_lock:
            number = await self._take_number()
        return await self._send(number, verb)

    @asynccontextmanager
    async def consecutive(self) -> AsyncIterator[Run]:
        """Provide a function that runs consecutively numbered operations; other operations wait for the block."""

        async def run(**verb: Any) -> OperationResult:
            return await self._send(await self._take_number(), verb)

        async with self._number_lock:
            yield run

    async def _take_number(self) -> int:
        if self._is_stale:
            await self._reload_number()
        await self._resolve_doubts()
        self._last_number += 1
        return self._last_number

    async def _send(self, number: int, verb: dict[str, Any]) -> OperationResult:
        operation = operation_pb2.Operation(adapter_id=self._adapter_id, sequence_number=number, **verb)
        sender = self.sender
        self._pending_count += 1
        try:
            async with queue_status_shown(lambda: self._find(number)):
                return await sender.send(operation)
        except Error as error:
            await self._after_failure(number, error, is_stream=sender.is_stream)
            raise
        except asyncio.CancelledError:
            self._in_doubt.add(number)
            raise
        finally:
            self._pending_count -= 1
            if not self._pending_count:
                self._is_idle.set()

    async def _find(self, number: int) -> training_service_pb2.GetOperationResponse:
        request = training_service_pb2.GetOperationRequest(adapter_id=self._adapter_id, sequence_number=number)
        return await self._connection.unary(self._training.GetOperation, request)

    async def _after_failure(self, number: int, error: Error, *, is_stream: bool) -> None:
        is_free = _frees_number(error)
        is_dropped = error.code is grpc.StatusCode.CANCELLED
        is_followed = number < self._last_number
        if error.reason in _NUMBER_CONFLICTS or (is_stream and is_followed and (is_free or is_dropped)):
            self._is_stale = True
        elif is_free:
            await self._return_number(number)
        elif error.disposition is not Disposition.FAILED:
            self._in_doubt.add(number)
            if is_dropped and is_followed:
                # Later operations wait for this number.
                with suppress(Error):
                    await self._resolve_doubts()

    async def _return_number(self, number: int) -> None:
        if number == self._last_number:
            self._last_number -= 1
            return
        # Later operations wait for this number, so an empty configuration change uses it.
        empty_change = operation_pb2.Configure(training_config=training_config_pb2.TrainingConfig())
        await UnarySender(self._connection).send(
            operation_pb2.Operation(adapter_id=self._adapter_id, sequence_number=number, configure=empty_change)
        )

    async def _reload_number(self) -> None:
        """Wait for pending operations, then fetch the last number from the service."""
        while self._pending_count:
            self._is_idle.clear()
            await self._is_idle.wait()
        adapter = adapter_service_pb2.GetAdapterRequest(adapter_id=self._adapter_id)
        response = await self._connection.unary(self._adapters.GetAdapter, adapter)
        self._last_number = response.adapter.sequence_number
        self._is_stale = False
        self._in_doubt.clear()

    async def _resolve_doubts(self) -> None:
        """Query the service for the numbers in doubt, and free the unused numbers."""
        # Descending order, so that several unused numbers at the end can all be assigned again.
        for number in sorted(self._in_doubt, reverse=True):
            is_used = await self._is_on_record(number)
            if number in self._in_doubt:
                self._in_doubt.discard(number)
                if not is_used:
                    await self._return_number(number)

    async def _is_on_record(self, number: int) -> bool:
        try:
            await self._find(number)
        except NotFoundError:
            return False
        return True


def _frees_number(error: Error) -> bool:
    """Return whether the operation's number can be used again without querying the service."""
    if error.code is grpc.StatusCode.UNAVAILABLE:
        # The response may belong to a retry, and an earlier attempt may have reached the service.
        return False
    return error.disposition in {Disposition.REFUSED, Disposition.RETRYABLE}
