"""The queues of all adapters. A queue is restored from the journal's record on demand, and dropped when it is idle."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from twinkle_services.model.application.adapter_queue import AdapterQueue
from twinkle_services.model.application.residency import Residency
from twinkle_services.model.domain.errors import JournalUnavailable
from twinkle_services.model.domain.journal import RecordEntry
from twinkle_services.model.domain.sequence import RECORD_LENGTH, OperationSequence
from twinkle_services.model.ports import Journal


class Queues:
    """Creates and stores the queues of adapters. Concurrency: use it from one event loop only."""

    def __init__(self, journal: Journal, residency: Residency, *, gap_seconds: float) -> None:
        """Create an empty collection; `gap_seconds` is passed to each `AdapterQueue`."""
        self._journal = journal
        self._residency = residency
        self._gap_seconds = gap_seconds
        self._queues: dict[str, AdapterQueue] = {}
        self._users: Counter[str] = Counter()
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        """Return the number of queues in memory."""
        return len(self._queues)

    @asynccontextmanager
    async def use(self, adapter_id: str) -> AsyncIterator[AdapterQueue]:
        """Open an adapter's queue and keep it in memory while the block runs.

        Raises:
            DomainError: The record cannot be read, or its missing outcomes cannot be recomputed now.
        """
        self._users[adapter_id] += 1
        try:
            yield await self._open(adapter_id)
        finally:
            self._users[adapter_id] -= 1
            if not self._users[adapter_id]:
                del self._users[adapter_id]

    def find(self, adapter_id: str) -> AdapterQueue | None:
        """Return an adapter's queue; None if it is not in memory."""
        return self._queues.get(adapter_id)

    def is_in_use(self, adapter_id: str) -> bool:
        """Return whether an adapter's queue has a running operation, or is kept by `use`."""
        queue = self._queues.get(adapter_id)
        return self._users[adapter_id] > 0 or (queue is not None and queue.is_running)

    async def forget(self, adapter_id: str) -> None:
        """Drop the queue of a deleted adapter, and wait for its running operation."""
        queue = self._queues.pop(adapter_id, None)
        if queue is not None:
            await queue.close()

    def drop_idle(self) -> None:
        """Drop the unused queues of adapters that are not resident."""
        for adapter_id in list(self._queues):
            if not self.is_in_use(adapter_id) and not self._residency.is_resident(adapter_id):
                del self._queues[adapter_id]

    async def close(self) -> None:
        """Close all queues, and wait for their running operations."""
        for adapter_id in list(self._queues):
            await self.forget(adapter_id)

    async def _open(self, adapter_id: str) -> AdapterQueue:
        async with self._opening.setdefault(adapter_id, asyncio.Lock()):
            if adapter_id not in self._queues:
                self.drop_idle()
                entries = await self._record(adapter_id)
                last_number = entries[-1].sequence_number if entries else 0
                sequence = OperationSequence.restored(adapter_id, entries, last_number)
                queue = AdapterQueue(adapter_id, gap_seconds=self._gap_seconds, sequence=sequence)
                self._queues[adapter_id] = queue
            return self._queues[adapter_id]

    async def _record(self, adapter_id: str) -> Sequence[RecordEntry]:
        """Return the last operations. An outcome is missing only if the restored snapshot includes its operation."""
        entries = await self._journal.record(adapter_id, size=RECORD_LENGTH)
        if all(entry.outcome is not None for entry in entries):
            return entries
        # The process stopped before these outcomes were recorded: replay recomputes them.
        await self._residency.discard(adapter_id)
        async with self._residency.hold(adapter_id) as resident:
            entries = await self._journal.record(adapter_id, size=RECORD_LENGTH)
            if any(entry.outcome is None and entry.sequence_number > resident.restored_number for entry in entries):
                # A recomputed outcome could not be written. Without the outcome, its operation would block the queue.
                raise JournalUnavailable(adapter_id)
        return entries
