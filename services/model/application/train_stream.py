"""Carry out the operations of a stream: many under way, each adapter's results in order."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from services.kit.caller import Caller
from services.kit.errors import DomainError
from services.model.application.execute_operation import ExecuteOperation
from services.model.domain.operation import Operation
from services.model.domain.result import OperationResult

WINDOW = 64
"""Operations of one stream under way; more wait in the transport, which slows the sender down."""


@dataclass(frozen=True)
class Refused:
    """An operation of a stream that failed, or that could not be read."""

    adapter_id: str
    sequence_number: int
    error: DomainError


class TrainStream:
    """Pipelines operations. For one event loop."""

    def __init__(self, execute: ExecuteOperation) -> None:
        """Carry operations out by `execute`."""
        self._execute = execute

    async def __call__(
        self, caller: Caller, operations: AsyncIterator[Operation | Refused]
    ) -> AsyncGenerator[OperationResult | Refused, None]:
        """Yield a result for each operation, as they end."""
        results: asyncio.Queue[OperationResult | Refused | None] = asyncio.Queue(WINDOW)
        async with asyncio.TaskGroup() as group:
            feeding = group.create_task(self._feed(caller, operations, results))
            try:
                while (result := await results.get()) is not None:
                    yield result
            finally:
                feeding.cancel()

    async def _feed(
        self,
        caller: Caller,
        operations: AsyncIterator[Operation | Refused],
        results: 'asyncio.Queue[OperationResult | Refused | None]',
    ) -> None:
        window = asyncio.Semaphore(WINDOW)
        async with asyncio.TaskGroup() as group:
            async for operation in operations:
                await window.acquire()
                task = group.create_task(self._carry_out(caller, operation, results))
                task.add_done_callback(lambda _: window.release())
        await results.put(None)

    async def _carry_out(
        self,
        caller: Caller,
        operation: Operation | Refused,
        results: 'asyncio.Queue[OperationResult | Refused | None]',
    ) -> None:
        if isinstance(operation, Refused):
            await results.put(operation)
            return
        try:
            result = await self._execute(caller, operation, is_waiting_allowed=True)
        except DomainError as error:
            await results.put(Refused(operation.adapter_id, operation.sequence_number, error))
        else:
            await results.put(result)
