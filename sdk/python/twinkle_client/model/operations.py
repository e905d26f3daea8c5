"""One adapter's operations: numbered in the order they are asked for, each applied once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import grpc

from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_config_pb2, training_service_pb2
from twinkle.api.model.v1.adapter_service_pb2_grpc import AdapterServiceStub
from twinkle.api.model.v1.training_service_pb2_grpc import TrainingServiceStub
from twinkle_client.errors import Disposition, Error, NotFoundError
from twinkle_client.model.carriers import CallCarrier, Carrier, OperationResult
from twinkle_client.model.waiting import telling_the_wait
from twinkle_client.rpc import Connection

_OUT_OF_STEP = frozenset({'SEQUENCE_GAP', 'SEQUENCE_REUSED'})
"""With these the service and this program count differently."""


class Run(Protocol):
    """Runs one verb."""

    async def __call__(self, **verb: Any) -> OperationResult:
        """See `OperationLog.run`."""
        ...


class OperationLog:
    """Numbers an adapter's operations. Lives on the connection's loop.

    A number is taken before anything is awaited, so that operations begun in some order are
    numbered in it. What was refused gives its number back; where that cannot be told, the
    service is asked before the next one is taken. On a stream, what was begun behind a refused
    operation fails with it, since nothing was to be applied that counted on it.
    """

    def __init__(self, connection: Connection, adapter_id: str, *, last_number: int) -> None:
        """Go on after `last_number`."""
        self.carrier: Carrier = CallCarrier(connection)
        self._connection = connection
        self._adapter_id = adapter_id
        self._training = TrainingServiceStub(connection.channel)
        self._adapters = AdapterServiceStub(connection.channel)
        self._last_number = last_number
        self._in_doubt: set[int] = set()
        self._is_stale = False
        self._under_way = 0
        self._is_idle = asyncio.Event()
        # First come, first served, and taken at once where nobody waits: numbers follow the order of begin.
        self._turn = asyncio.Lock()

    async def run(self, **verb: Any) -> OperationResult:
        """Send an operation and return its result.

        Args:
            verb: the name of a verb of `Operation` and its message.

        Raises:
            Error: it failed or was refused.
        """
        async with self._turn:
            number = await self._take_number()
        return await self._send(number, verb)

    @asynccontextmanager
    async def together(self) -> AsyncIterator[Run]:
        """Give the block a way to run operations with none of others, begun meanwhile, between them."""

        async def run(**verb: Any) -> OperationResult:
            return await self._send(await self._take_number(), verb)

        async with self._turn:
            yield run

    async def _take_number(self) -> int:
        if self._is_stale:
            await self._count_anew()
        await self._settle_doubts()
        self._last_number += 1
        return self._last_number

    async def _send(self, number: int, verb: dict[str, Any]) -> OperationResult:
        operation = operation_pb2.Operation(adapter_id=self._adapter_id, sequence_number=number, **verb)
        carrier = self.carrier
        self._under_way += 1
        try:
            async with telling_the_wait(lambda: self._find(number)):
                return await carrier.send(operation)
        except Error as error:
            await self._after_failure(number, error, is_stream=carrier.is_stream)
            raise
        except asyncio.CancelledError:
            self._in_doubt.add(number)
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._is_idle.set()

    async def _find(self, number: int) -> training_service_pb2.GetOperationResponse:
        request = training_service_pb2.GetOperationRequest(adapter_id=self._adapter_id, sequence_number=number)
        return await self._connection.unary(self._training.GetOperation, request)

    async def _after_failure(self, number: int, error: Error, *, is_stream: bool) -> None:
        is_free = _frees_number(error)
        is_dropped = error.code is grpc.StatusCode.CANCELLED
        is_followed = number < self._last_number
        if error.reason in _OUT_OF_STEP or (is_stream and is_followed and (is_free or is_dropped)):
            self._is_stale = True
        elif is_free:
            await self._give_back(number)
        elif error.disposition is not Disposition.FAILED:
            self._in_doubt.add(number)
            if is_dropped and is_followed:
                # Those after it wait for its number.
                with suppress(Error):
                    await self._settle_doubts()

    async def _give_back(self, number: int) -> None:
        if number == self._last_number:
            self._last_number -= 1
            return
        # Later operations are under way and wait for this number: an empty change lets them go on.
        nothing = operation_pb2.Configure(training_config=training_config_pb2.TrainingConfig())
        await CallCarrier(self._connection).send(
            operation_pb2.Operation(adapter_id=self._adapter_id, sequence_number=number, configure=nothing)
        )

    async def _count_anew(self) -> None:
        """Ask which number the service expects next, once nothing is under way that counts as before."""
        while self._under_way:
            self._is_idle.clear()
            await self._is_idle.wait()
        adapter = adapter_service_pb2.GetAdapterRequest(adapter_id=self._adapter_id)
        response = await self._connection.unary(self._adapters.GetAdapter, adapter)
        self._last_number = response.adapter.sequence_number
        self._is_stale = False
        self._in_doubt.clear()

    async def _settle_doubts(self) -> None:
        """Find out which of the numbers in doubt were used."""
        # From the last to the first, so that numbers at the end are given back and none is left out.
        for number in sorted(self._in_doubt, reverse=True):
            is_used = await self._is_on_record(number)
            if number in self._in_doubt:
                self._in_doubt.discard(number)
                if not is_used:
                    await self._give_back(number)

    async def _is_on_record(self, number: int) -> bool:
        try:
            await self._find(number)
        except NotFoundError:
            return False
        return True


def _frees_number(error: Error) -> bool:
    """Return whether the operation's number can be used again without asking the service."""
    if error.code is grpc.StatusCode.UNAVAILABLE:
        # The answer may belong to a retry, and an earlier attempt may have reached the service.
        return False
    return error.disposition in {Disposition.REFUSED, Disposition.RETRYABLE}
