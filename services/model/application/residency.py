"""Controls which adapters are in the engine's memory: those in use, and idle ones while slots are free.

An adapter that is not resident uses no memory of the engine. It is restored from the journal when its next operation
arrives. Snapshots make the restore fast. They are copied between two operations and, unless the adapter is parked or
saved, written in the background.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import structlog

from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import AdapterNotFound, DomainError
from twinkle_services.kit.failpoints import reach
from twinkle_services.model.application.attempts import Attempts
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.lease import ReplicaLease
from twinkle_services.model.application.resident import ResidencyBounds, Resident
from twinkle_services.model.application.restore import Restore, RestoredAdapter
from twinkle_services.model.application.waits import ChangeNotifier, ShortWork
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.journal import Snapshot
from twinkle_services.model.ports import Journal, TrainerBackend

_log = structlog.get_logger('residency')


class Residency:
    """Loads adapters into the engine and evicts them. Concurrency: use it from one event loop only."""

    def __init__(
        self,
        backend: TrainerBackend,
        journal: Journal,
        directory: AdapterDirectory,
        *,
        clock: Clock,
        bounds: ResidencyBounds,
    ) -> None:
        self._backend = backend
        self._journal = journal
        self._directory = directory
        self._clock = clock
        self._bounds = bounds
        self.restore = Restore(backend, journal, directory, clock=clock)
        self.short_work = ShortWork()
        self.attempts = Attempts(journal, clock=clock)
        self.lease = ReplicaLease(journal, directory, clock=clock, bounds=bounds)
        """The lease of the replica; while an adapter has it, no other adapter is in the engine."""
        self._residents: OrderedDict[str, Resident] = OrderedDict()
        self._eviction_lock = asyncio.Lock()
        self._changes = ChangeNotifier()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def resident_count(self) -> int:
        """Number of adapters in the engine."""
        return sum(resident.is_loaded for resident in self._residents.values())

    def is_resident(self, adapter_id: str) -> bool:
        """Return whether an adapter is in the engine."""
        resident = self._residents.get(adapter_id)
        return resident is not None and resident.is_loaded

    @asynccontextmanager
    async def hold(self, adapter_id: str) -> AsyncIterator[Resident]:
        """Keep an adapter in the engine while the block runs, restoring it first if needed.

        Raises:
            AdapterNotFound, AdapterDamaged, JournalUnavailable: The adapter cannot be restored now.
            ReplicaLeased: Another adapter has the lease of the replica.
            ReplicaInUse, FullParametersDisabled: The adapter needs the lease, and the lease cannot be granted.
        """
        resident = self._resident_of(adapter_id)
        resident.user_count += 1
        try:
            await self._acquire(resident)
            try:
                yield resident
            finally:
                self._release(resident)
        finally:
            resident.user_count -= 1
            self._drop_unused(resident)

    @asynccontextmanager
    async def reserve(self, adapter_id: str) -> AsyncIterator[None]:
        """Reserve a slot for an adapter that the block creates; if the block fails, the adapter is removed.

        Raises:
            ReplicaLeased: Another adapter has the lease of the replica.
        """
        resident = self._resident_of(adapter_id)
        resident.user_count += 1
        is_done = False
        try:
            async with resident.lock:
                await self._reserve_slot(resident)
                yield
                is_done = True
        finally:
            if not is_done:
                await self._unload(resident)
            resident.user_count -= 1
            resident.last_used = self._clock.monotonic()
            self._drop_unused(resident)
            # This adapter can be evicted now, and other adapters may be waiting for its slot.
            self._changes.notify()

    @asynccontextmanager
    async def at_rest(self, adapter_id: str) -> AsyncIterator[bool]:
        """Keep an adapter in the engine, and start none of its operations, while the block runs.

        The context yields False if an operation of the adapter is already running. Otherwise, it yields True, after a
        snapshot if operations followed the last one and no Forward waits for its Backward.

        Raises:
            DomainError: See `hold`.
        """
        async with self.hold(adapter_id) as resident, resident.lock:
            is_at_rest = resident.holder_count == 1
            with self.short_work.begin():
                if is_at_rest and resident.operation_count:
                    await _wait_for(resident.writing)
                    await self._snapshot_now(resident)
                yield is_at_rest

    async def park(self, adapter_id: str) -> None:
        """Evict an adapter now, after a snapshot, and end its lease; do nothing if an operation uses or awaits it.

        Raises:
            JournalUnavailable: The end of the lease could not be recorded.
        """
        resident = self._residents.get(adapter_id)
        if resident is not None and not resident.user_count:
            await _wait_for(resident.copying)
            await self._page_out(resident)

    def take_lease(self, adapter_id: str) -> None:
        """Lease the replica to an adapter.

        Raises:
            ReplicaLeased, ReplicaInUse, FullParametersDisabled: The lease cannot be granted.
        """
        self.lease.take(adapter_id, is_in_use=self._is_used_by_others(adapter_id))

    async def end_lease(self, adapter_id: str, *, suspended_seconds: float = 0.0) -> None:
        """Park an adapter that has the lease once its running operation has finished; refuse its waiting operations.

        Args:
            adapter_id: Id of the adapter; the call does nothing if the adapter does not have the lease.
            suspended_seconds: Time after the end for which the adapter's operations are refused, so that others can
                use the replica.

        Raises:
            JournalUnavailable: The end of the lease could not be recorded.
        """
        if not self.lease.is_held_by(adapter_id):
            return
        self.lease.suspend(adapter_id, seconds=math.inf)
        try:
            while self.lease.is_held_by(adapter_id):
                resident = self._resident_of(adapter_id)
                if resident.holder_count:
                    await self._changes.wait()
                else:
                    await _wait_for(resident.copying)
                    await self._page_out(resident)
        finally:
            self.lease.suspend(adapter_id, seconds=suspended_seconds)

    async def discard(self, adapter_id: str) -> None:
        """Drop an adapter's state in the engine; the next use restores it from the journal."""
        resident = self._residents.get(adapter_id)
        if resident is not None:
            await self._unload(resident)

    async def forget(self, adapter_id: str) -> None:
        """Remove a deleted adapter from the engine once its snapshots are written, and end its lease."""
        resident = self._residents.get(adapter_id)
        if resident is not None:
            await _wait_for(resident.copying)
            await _wait_for(resident.writing)
            async with resident.lock:
                await self._unload(resident)
        self.lease.end(adapter_id)
        if resident is not None:
            self._drop_unused(resident)
        self._changes.notify()

    async def evict_idle(self) -> None:
        """Evict the adapters that have been idle for longer than the limit, and end their leases."""
        limit = self._clock.monotonic() - self._bounds.idle_seconds
        for resident in list(self._residents.values()):
            if resident.last_used > limit or not self._is_parkable(resident):
                continue
            try:
                await self._page_out(resident)
            except DomainError as error:
                _log.warning('lease not ended; retrying', adapter=resident.adapter_id, error=str(error))

    async def close(self) -> None:
        """Wait until all snapshots in progress are written."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _acquire(self, resident: Resident) -> None:
        # A due snapshot is taken first; otherwise the snapshot of a busy adapter would never be taken.
        await _wait_for(resident.copying)
        async with resident.lock:
            self.lease.check(resident.adapter_id)
            if not resident.is_loaded:
                await self._page_in(resident)
            # Count the holder before releasing the lock, so that the adapter never looks idle in between.
            resident.holder_count += 1
        self._residents.move_to_end(resident.adapter_id)

    async def _page_in(self, resident: Resident) -> None:
        known = self._directory.find(resident.adapter_id)
        if known is not None and known.is_full_parameter:
            await self.lease.resume(known, is_in_use=self._is_used_by_others(known.adapter_id))
        await self._reserve_slot(resident)
        is_done = False
        try:
            current = self._directory.find(resident.adapter_id)
            if current is None:
                raise AdapterNotFound(resident.adapter_id)
            with self.short_work.begin():
                restored = await self.restore(current)
            is_done = True
        finally:
            if not is_done:
                await self._unload(resident)
        self._count(resident, restored)

    def _count(self, resident: Resident, restored: RestoredAdapter) -> None:
        resident.device_seconds = restored.device_seconds
        resident.operation_count = restored.replayed_count
        resident.restored_number = restored.snapshot_number

    async def _reserve_slot(self, resident: Resident) -> None:
        """Wait for a slot in the engine and take it.

        Raises:
            ReplicaLeased: Another adapter has the lease.
        """
        async with self._eviction_lock:
            while self.resident_count >= self._bounds.resident_adapters:
                self.lease.check(resident.adapter_id)
                victim = self._victim()
                if victim is None:
                    await self._changes.wait()
                else:
                    await self._page_out(victim)
            # The replica may have been leased during the wait.
            self.lease.check(resident.adapter_id)
            resident.is_loaded = True

    def _is_used_by_others(self, adapter_id: str) -> bool:
        return any(item.is_loaded for item in self._residents.values() if item.adapter_id != adapter_id)

    def _victim(self) -> Resident | None:
        """Return the least recently used adapter that can be evicted, if any, preferably without a pending Forward."""
        evictable = [resident for resident in self._residents.values() if _is_evictable(resident)]
        return min(evictable, key=lambda resident: resident.is_pending, default=None)

    async def _page_out(self, resident: Resident) -> None:
        async with resident.lock:
            if resident.holder_count:
                return
            if resident.is_loaded:
                with self.short_work.begin():
                    await self._snapshot_and_unload(resident)
            await self.lease.release(resident.adapter_id)
        self._changes.notify()
        self._drop_unused(resident)

    async def _snapshot_and_unload(self, resident: Resident) -> None:
        await _wait_for(resident.writing)
        if resident.operation_count:
            await self._snapshot_now(resident)
        reach('page_out.recorded')
        await self._unload(resident)

    async def _snapshot_now(self, resident: Resident) -> None:
        adapter = self._directory.find(resident.adapter_id)
        if adapter is None:
            return
        try:
            state = await self._backend.snapshot(resident.adapter_id)
            # There is no snapshot while a Forward waits for its Backward; replay restores the adapter instead.
            if state is not None:
                await self._journal.add_snapshot(_snapshot_of(adapter, state))
                resident.mark_snapshotted()
        except DomainError as error:
            _log.warning(
                'snapshot failed before eviction; replay will take longer',
                adapter=resident.adapter_id,
                error=str(error),
            )

    async def _unload(self, resident: Resident) -> None:
        if resident.is_loaded:
            await self._backend.delete_adapter(resident.adapter_id)
            resident.is_loaded = False
            self._changes.notify()

    def _release(self, resident: Resident) -> None:
        resident.holder_count -= 1
        resident.last_used = self._clock.monotonic()
        if resident.is_loaded and self._is_snapshot_due(resident):
            resident.copying = self._spawn(self._copy(resident))
        self._changes.notify()

    def _drop_unused(self, resident: Resident) -> None:
        is_in_use = resident.is_loaded or resident.user_count or resident.lock.locked()
        # The adapter that has the lease stays registered, so that the lease can end even if the adapter cannot be
        # loaded.
        is_kept = is_in_use or self.lease.is_held_by(resident.adapter_id)
        if not is_kept and self._residents.get(resident.adapter_id) is resident:
            del self._residents[resident.adapter_id]

    def _is_parkable(self, resident: Resident) -> bool:
        is_idle_leaseholder = self.lease.is_held_by(resident.adapter_id) and not resident.user_count
        return _is_evictable(resident) or is_idle_leaseholder

    def _is_snapshot_due(self, resident: Resident) -> bool:
        is_costly = resident.device_seconds >= self._bounds.snapshot_device_seconds
        is_long = resident.operation_count >= self._bounds.snapshot_operations
        is_in_progress = resident.copying is not None or resident.writing is not None
        return (is_costly or is_long) and not resident.holder_count and not is_in_progress

    async def _copy(self, resident: Resident) -> None:
        """Copy the adapter's state before its next operation starts, and write the copy in the background."""
        try:
            async with resident.lock:
                if resident.holder_count:
                    return
                adapter = self._directory.find(resident.adapter_id)
                state = await self._backend.snapshot(resident.adapter_id) if resident.is_loaded else None
                if adapter is None or state is None:
                    return
                snapshot = _snapshot_of(adapter, state)
                resident.mark_snapshotted()
            reach('snapshot.taken')
            resident.writing = self._spawn(self._write(resident, snapshot))
        except DomainError as error:
            _log.warning('snapshot copy failed', adapter=resident.adapter_id, error=str(error))
        finally:
            resident.copying = None
            # An adapter cannot be evicted while it is copied, so others may wait until the copy is complete.
            self._changes.notify()

    async def _write(self, resident: Resident, snapshot: Snapshot) -> None:
        try:
            await self._journal.add_snapshot(snapshot)
        except DomainError as error:
            _log.warning('snapshot write failed', adapter=resident.adapter_id, error=str(error))
        finally:
            resident.writing = None

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error('snapshot task failed', exc_info=error)

    def _resident_of(self, adapter_id: str) -> Resident:
        return self._residents.setdefault(adapter_id, Resident(adapter_id))


def _is_evictable(resident: Resident) -> bool:
    return resident.is_loaded and not resident.holder_count and resident.copying is None and not resident.lock.locked()


def _snapshot_of(adapter: Adapter, state: AdapterState) -> Snapshot:
    return Snapshot(sequence_number=adapter.sequence_number, adapter=adapter, state=state)


async def _wait_for(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        await asyncio.wait([task])
