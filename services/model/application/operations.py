"""Looks up, waits for, watches and cancels operations of an adapter."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError, Draining
from twinkle_services.model.application.adapter_queue import AdapterQueue
from twinkle_services.model.application.admission import Admission
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.dispatcher import Dispatcher
from twinkle_services.model.application.queues import Queues
from twinkle_services.model.application.train_stream import OperationFailure
from twinkle_services.model.application.waits import Waits
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.domain.sequence import Entry


class OperationState(Enum):
    """State of an operation; see the enum of the same name in `twinkle.api.model.v1`."""

    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(frozen=True)
class OperationRecord:
    """State of an operation, and its outcome once it has finished."""

    state: OperationState
    result: OperationResult | None = None
    error: DomainError | None = None
    queue_position: int = 0
    """Number of operations ahead of a queued operation."""
    estimated_wait: timedelta = timedelta()
    """Estimated time until a queued operation starts."""

    @classmethod
    def of(cls, entry: Entry) -> 'OperationRecord':
        """Return the record of an accepted operation."""
        if entry.is_running:
            return cls(OperationState.RUNNING)
        state = OperationState.DONE if entry.error is None else OperationState.FAILED
        return cls(state, entry.result, entry.error)


class Operations:
    """Reads the records of the adapters' queues and cancels waiting operations.

    A watcher reads the record and has no buffer, so a slow watcher uses no memory. The watch fails if a result is
    removed from the record before the watcher has read it.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self, directory: AdapterDirectory, queues: Queues, dispatcher: Dispatcher, admission: Admission, waits: Waits
    ) -> None:
        self._directory = directory
        self._queues = queues
        self._dispatcher = dispatcher
        self._admission = admission
        self._waits = waits
        self._watched: Counter[AdapterQueue] = Counter()
        self._is_closed = False

    async def find(
        self, caller: Caller, adapter_id: str, sequence_number: int, *, max_wait: timedelta = timedelta()
    ) -> OperationRecord:
        """Return the record of an operation, after waiting up to `max_wait` for its outcome.

        Raises:
            ScopeMissing, AdapterNotFound, AdapterExpired, AdapterDamaged: See `AdapterDirectory.get`.
            OperationNotFound: The operation was never accepted, or is no longer on record.
            DomainError: The adapter's queue cannot be opened; see `Queues.use`.
        """
        self._directory.get(caller, adapter_id)
        async with self._queues.use(adapter_id) as queue:
            try:
                async with asyncio.timeout(max_wait.total_seconds()):
                    while not queue.is_settled(sequence_number):
                        await queue.wait_for_change()
                        self._directory.get(caller, adapter_id)
            except TimeoutError:
                # Not an error: the caller receives the operation's current state.
                pass
            return self._record(queue, adapter_id, sequence_number)

    async def watch(
        self, caller: Caller, adapter_id: str, *, after: int
    ) -> AsyncGenerator[OperationResult | OperationFailure, None]:
        """Yield the outcome of each operation after number `after`, in order: recorded outcomes first, then new ones.

        Raises:
            ScopeMissing, AdapterNotFound, AdapterExpired, AdapterDamaged: See `AdapterDirectory.get`; also raised if
                the adapter is removed later.
            OperationNotFound: The next outcome is no longer on record.
            Draining: The service is shutting down.
            DomainError: The adapter's queue cannot be opened; see `Queues.use`.
        """
        self._directory.get(caller, adapter_id)
        async with self._queues.use(adapter_id) as queue:
            self._watched[queue] += 1
            try:
                number = after + 1
                while not self._is_closed:
                    self._directory.get(caller, adapter_id)
                    if number <= queue.sequence.last_number and queue.is_settled(number):
                        yield _outcome(queue, adapter_id, number)
                        number += 1
                    else:
                        await queue.wait_for_change()
            finally:
                self._watched -= Counter([queue])
        raise Draining()

    async def cancel(self, caller: Caller, adapter_id: str, sequence_number: int) -> bool:
        """Cancel an operation, and return whether it was cancelled before its last pass.

        A cancelled operation frees its sequence number and changes nothing. A pass is never interrupted.

        Raises:
            ScopeMissing, AdapterNotFound, AdapterExpired, AdapterDamaged: See `AdapterDirectory.get`.
            OperationNotFound: The operation was never accepted, or is no longer on record.
            DomainError: The adapter's queue cannot be opened; see `Queues.use`.
        """
        self._directory.get(caller, adapter_id)
        async with self._queues.use(adapter_id) as queue:
            if queue.is_waiting(sequence_number):
                return queue.drop(sequence_number)
            entry = queue.sequence.entry(sequence_number)
            if not entry.is_running or not self._stop(adapter_id):
                return False
            while entry.is_running and queue.sequence.last_number >= sequence_number and not queue.is_closed:
                # The journal entry is deleted before the call returns, so that a restart does not replay the operation.
                await queue.wait_for_change()
            return entry.is_running

    def drop_operations(self, adapter_id: str) -> None:
        """Cancel all operations of an adapter, except one whose last pass is running."""
        queue = self._queues.find(adapter_id)
        if queue is not None:
            queue.drop_all()
        self._admission.drop(adapter_id)
        self._stop(adapter_id)

    def close(self) -> None:
        """Close all watches; otherwise open watches would delay the shutdown."""
        self._is_closed = True
        for queue in self._watched:
            queue.notify_watchers()

    def _stop(self, adapter_id: str) -> bool:
        """Cancel the adapter's operation that waits or needs more passes; return False if none can be cancelled."""
        return self._dispatcher.cancel(adapter_id) or self._waits.cancel(adapter_id)

    def _record(self, queue: AdapterQueue, adapter_id: str, number: int) -> OperationRecord:
        if not queue.is_waiting(number):
            entry = queue.sequence.entry(number)
            position = self._dispatcher.position_of(adapter_id) if entry.is_running else None
            if position is None:
                return OperationRecord.of(entry)
            return OperationRecord(
                OperationState.QUEUED, queue_position=position.operation_count, estimated_wait=position.estimated_wait
            )
        first = self._dispatcher.position_of(adapter_id)
        last = queue.sequence.last_number
        before = number - last - 1 + queue.is_running
        wait = self._dispatcher.estimate_time(before)
        if first is not None:
            before, wait = before + first.operation_count, wait + first.estimated_wait
        return OperationRecord(OperationState.QUEUED, queue_position=before, estimated_wait=wait)


def _outcome(queue: AdapterQueue, adapter_id: str, number: int) -> OperationResult | OperationFailure:
    entry = queue.sequence.entry(number)
    if entry.result is not None:
        return entry.result
    assert entry.error is not None  # noqa: S101 - settled entries have a result or an error
    return OperationFailure(adapter_id, number, entry.error)
