"""Runs the operations of a stream concurrently, and returns each adapter's results in order.

A refused operation frees its number, so the operations after it cannot run until the number is sent again. If the
refusal is temporary (UNAVAILABLE, or RESOURCE_EXHAUSTED with a retry time), the later operations wait for the number.
Otherwise they fail immediately with SEQUENCE_GAP until the stream sends the missing number. As in a database pipeline,
an operation is not applied if an earlier one was refused.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError
from twinkle_services.model.application.execute_operation import ExecuteOperation
from twinkle_services.model.application.queues import Queues
from twinkle_services.model.application.waits import ChangeNotifier
from twinkle_services.model.domain.errors import SequenceGap
from twinkle_services.model.domain.operation import Operation
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.domain.sequence import is_refusal

WINDOW = 64
"""Maximum number of a stream's operations in progress; further ones wait in the transport and slow down the sender."""


@dataclass(frozen=True)
class OperationFailure:
    """An operation that failed, or that could not be parsed."""

    adapter_id: str
    sequence_number: int
    error: DomainError


class TrainStream:
    """Runs operations of streams. Concurrency: use it from one event loop only."""

    def __init__(self, execute: ExecuteOperation, queues: Queues) -> None:
        self._execute = execute
        self._queues = queues

    async def __call__(
        self, caller: Caller, operations: AsyncIterator[Operation | OperationFailure]
    ) -> AsyncGenerator[OperationResult | OperationFailure, None]:
        """Yield one result per operation, in the order of the numbers of each adapter."""
        stream = _Stream(self._execute, self._queues, caller)
        # A task group around `yield` would turn the GeneratorExit of a closed generator into an exception group.
        feeding = asyncio.create_task(stream.feed(operations))
        try:
            while (result := await stream.results.get()) is not None:
                yield result
            await feeding
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


class _Stream:
    """Operations in progress of one stream."""

    def __init__(self, execute: ExecuteOperation, queues: Queues, caller: Caller) -> None:
        self._execute = execute
        self._queues = queues
        self._caller = caller
        self._window = asyncio.Semaphore(WINDOW)
        self._pending_numbers: dict[str, list[int]] = {}
        """Numbers of operations without a result, by adapter."""
        self._refused_numbers: dict[str, int] = {}
        """First refused number that has not been sent again, by adapter."""
        self._result_sent = ChangeNotifier()
        self.results: asyncio.Queue[OperationResult | OperationFailure | None] = asyncio.Queue(WINDOW)

    async def feed(self, operations: AsyncIterator[Operation | OperationFailure]) -> None:
        """Run all operations, and put None into `results` after the last result.

        Raises:
            BaseExceptionGroup: The operations could not be read, or an operation failed unexpectedly.
        """
        try:
            await self._run_all(operations)
        except BaseExceptionGroup:
            await self.results.put(None)
            raise
        await self.results.put(None)

    async def _run_all(self, operations: AsyncIterator[Operation | OperationFailure]) -> None:
        """Start each operation; read the next one once this one has a slot in the tenant's queue."""
        async with asyncio.TaskGroup() as group:
            async for operation in operations:
                await self._window.acquire()
                self._pending_numbers.setdefault(operation.adapter_id, []).append(operation.sequence_number)
                admitted = asyncio.Event()
                group.create_task(self._execute_in_order(operation, admitted))
                await admitted.wait()

    async def _execute_in_order(self, operation: Operation | OperationFailure, admitted: asyncio.Event) -> None:
        adapter_id, number = operation.adapter_id, operation.sequence_number
        try:
            result = await self._outcome(operation, admitted)
            if isinstance(result, OperationFailure):
                self._record_refusal(result)
            admitted.set()
            numbers = self._pending_numbers[adapter_id]
            while min(numbers) < number:
                await self._result_sent.wait()
            await self.results.put(result)
        finally:
            self._remove_number(adapter_id, number)
            self._window.release()

    async def _outcome(
        self, operation: Operation | OperationFailure, admitted: asyncio.Event
    ) -> OperationResult | OperationFailure:
        if isinstance(operation, OperationFailure):
            return operation
        try:
            self._check_gap(operation)
            return await self._execute(
                self._caller, operation, is_waiting_allowed=True, on_admitted=lambda: self._admit(operation, admitted)
            )
        except DomainError as error:
            return OperationFailure(operation.adapter_id, operation.sequence_number, error)

    def _admit(self, operation: Operation, admitted: asyncio.Event) -> None:
        # An earlier operation may have been refused while this one waited for a slot.
        self._check_gap(operation)
        admitted.set()

    def _check_gap(self, operation: Operation) -> None:
        """Refuse an operation after a missing number.

        Raises:
            SequenceGap: An earlier operation was refused.
        """
        adapter_id, number = operation.adapter_id, operation.sequence_number
        missing = self._refused_numbers.get(adapter_id)
        if missing is None or number < missing:
            return
        queue = self._queues.find(adapter_id)
        if number == missing or (queue is not None and queue.sequence.last_number >= missing):
            del self._refused_numbers[adapter_id]
            return
        raise SequenceGap(adapter_id, number, missing)

    def _record_refusal(self, refused: OperationFailure) -> None:
        adapter_id, number = refused.adapter_id, refused.sequence_number
        if not is_refusal(refused.error) or refused.error.disposition.is_transient:
            return
        self._refused_numbers[adapter_id] = min(number, self._refused_numbers.get(adapter_id, number))
        queue = self._queues.find(adapter_id)
        for later in [item for item in self._pending_numbers[adapter_id] if item > number]:
            if queue is not None:
                queue.skip(later, missing=number)

    def _remove_number(self, adapter_id: str, number: int) -> None:
        self._pending_numbers[adapter_id].remove(number)
        if not self._pending_numbers[adapter_id]:
            del self._pending_numbers[adapter_id]
        self._result_sent.notify()
