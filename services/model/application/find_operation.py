"""Look operations up, and wait for them."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto

from services.kit.caller import Caller
from services.kit.errors import DomainError
from services.model.application.adapter_queue import AdapterQueue
from services.model.application.directory import AdapterDirectory
from services.model.application.dispatcher import Dispatcher
from services.model.application.queues import Queues
from services.model.domain.result import OperationResult
from services.model.domain.sequence import Entry


class OperationState(Enum):
    """How far an operation is."""

    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(frozen=True)
class OperationRecord:
    """An operation as the record has it."""

    state: OperationState
    result: OperationResult | None = None
    error: DomainError | None = None
    queue_position: int = 0
    """Operations before it, while queued."""
    estimated_wait: timedelta = timedelta()
    """Until it begins, as far as can be told, while queued."""

    @classmethod
    def of(cls, entry: Entry) -> 'OperationRecord':
        """Return the record of an entry."""
        if entry.is_running:
            return cls(OperationState.RUNNING)
        state = OperationState.DONE if entry.error is None else OperationState.FAILED
        return cls(state, entry.result, entry.error)


class FindOperation:
    """Answers from the record of an adapter's queue."""

    def __init__(self, directory: AdapterDirectory, queues: Queues, dispatcher: Dispatcher) -> None:
        """Use the parts given."""
        self._directory = directory
        self._queues = queues
        self._dispatcher = dispatcher

    async def __call__(
        self, caller: Caller, adapter_id: str, sequence_number: int, *, patience: timedelta = timedelta()
    ) -> OperationRecord:
        """Return the record, once the operation is done or `patience` is over.

        Raises:
            AdapterNotFound: no such adapter of the caller.
            OperationNotFound: the operation is not here, or no longer on record.
        """
        self._directory.get(caller, adapter_id)
        async with self._queues.use(adapter_id) as queue:
            try:
                async with asyncio.timeout(patience.total_seconds()):
                    while not queue.is_settled(sequence_number):
                        await queue.wait_for_change()
                        self._directory.get(caller, adapter_id)
            except TimeoutError:
                # The time is up, not the operation: it is told as it stands.
                pass
            return self._record(queue, adapter_id, sequence_number)

    def _record(self, queue: AdapterQueue, adapter_id: str, number: int) -> OperationRecord:
        if not queue.is_waiting(number):
            entry = queue.sequence.entry(number)
            place = self._dispatcher.position_of(adapter_id) if entry.is_running else None
            if place is None:
                return OperationRecord.of(entry)
            return OperationRecord(
                OperationState.QUEUED, queue_position=place.operation_count, estimated_wait=place.estimated_wait
            )
        first = self._dispatcher.position_of(adapter_id)
        last = queue.sequence.last_number
        before = number - last - 1 + queue.is_running
        wait = self._dispatcher.time_of(before)
        if first is not None:
            before, wait = before + first.operation_count, wait + first.estimated_wait
        return OperationRecord(OperationState.QUEUED, queue_position=before, estimated_wait=wait)
