"""One adapter's operations: numbered in the order they are asked for, each applied once."""

import asyncio
from typing import Any

import grpc

from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_config_pb2, training_service_pb2
from twinkle.api.model.v1.adapter_service_pb2_grpc import AdapterServiceStub
from twinkle.api.model.v1.training_service_pb2_grpc import TrainingServiceStub
from twinkle_client.errors import Error, NotFoundError
from twinkle_client.model.carriers import CallCarrier, Carrier, OperationResult
from twinkle_client.rpc import Connection

_LEAVES_NUMBER_FREE = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""With these the service refused an operation before it was accepted."""


class OperationLog:
    """Numbers an adapter's operations. Lives on the connection's loop.

    A number is taken before anything is awaited, so that operations begun in some order are
    numbered in it. What was refused gives its number back; where that cannot be told, the
    service is asked before the next one is taken.
    """

    def __init__(self, connection: Connection, adapter_id: str, *, last_number: int) -> None:
        """Go on after `last_number`."""
        self.carrier: Carrier = CallCarrier(connection)
        self._connection = connection
        self._adapter_id = adapter_id
        self._training = TrainingServiceStub(connection.channel)
        self._adapters = AdapterServiceStub(connection.channel)
        self._last_number = last_number
        self._in_doubt: int | None = None
        self._is_stale = False
        self._asking = asyncio.Lock()

    async def run(self, **verb: Any) -> OperationResult:
        """Send an operation and return its result.

        Args:
            verb: the name of a verb of `Operation` and its message.

        Raises:
            Error: it failed or was refused.
        """
        if self._in_doubt is not None or self._is_stale or self._asking.locked():
            async with self._asking:
                await self._settle_doubt()
        self._last_number += 1
        number = self._last_number
        operation = operation_pb2.Operation(adapter_id=self._adapter_id, sequence_number=number, **verb)
        try:
            return await self.carrier.send(operation)
        except Error as error:
            await self._after_failure(number, error)
            raise
        except asyncio.CancelledError:
            self._in_doubt = number
            raise

    async def _after_failure(self, number: int, error: Error) -> None:
        if error.reason == 'SEQUENCE_REUSED':
            # Somebody else trains this adapter too.
            self._is_stale = True
        elif error.code in _LEAVES_NUMBER_FREE:
            await self._give_back(number)
        elif error.code is not grpc.StatusCode.FAILED_PRECONDITION:
            self._in_doubt = number

    async def _give_back(self, number: int) -> None:
        if number == self._last_number:
            self._last_number -= 1
            return
        # Later operations are under way and wait for this number: an empty change lets them go on.
        nothing = operation_pb2.Configure(training_config=training_config_pb2.TrainingConfig())
        await CallCarrier(self._connection).send(
            operation_pb2.Operation(adapter_id=self._adapter_id, sequence_number=number, configure=nothing)
        )

    async def _settle_doubt(self) -> None:
        """Find out which number the service expects next."""
        if self._is_stale:
            adapter = adapter_service_pb2.GetAdapterRequest(adapter_id=self._adapter_id)
            response = await self._connection.unary(self._adapters.GetAdapter, adapter)
            self._last_number = response.adapter.sequence_number
        elif self._in_doubt is not None:
            request = training_service_pb2.GetOperationRequest(
                adapter_id=self._adapter_id, sequence_number=self._in_doubt
            )
            try:
                await self._connection.unary(self._training.GetOperation, request)
            except NotFoundError:
                await self._give_back(self._in_doubt)
        self._is_stale, self._in_doubt = False, None
