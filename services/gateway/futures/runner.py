"""Runs futures: the futures of a lane one after the other, all others as soon as slots are free.

Only the record of a waiting future is in memory; its request is read when the future starts.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import structlog

from twinkle_services.gateway.errors import PositionMissing, PositionPassed
from twinkle_services.gateway.futures.capacity import FutureCapacity, FutureQueue, never_rate_limited
from twinkle_services.gateway.futures.lanes import Admission, Lanes
from twinkle_services.gateway.futures.ports import Executor
from twinkle_services.gateway.futures.records import FutureRecords, Outcome
from twinkle_services.gateway.futures.rules import Bounds, Future, FutureTaken
from twinkle_services.gateway.futures.waiters import Waiters
from twinkle_services.gateway.sampling.slots import equal_weight
from twinkle_services.kit.byte_gate import ByteGate
from twinkle_services.kit.errors import Cancelled, DomainError, Internal, NotSupportedHere

_log = structlog.get_logger('futures')


@dataclass(frozen=True, kw_only=True)
class RunnerLimits:
    """Slots of each base model, memory, and waiting times."""

    lanes: Bounds
    """Slots of futures in lanes."""
    unordered: Bounds
    """Slots of futures without a lane."""
    memory: ByteGate
    """Bounds the requests of running futures in lanes."""
    unordered_memory: ByteGate
    """Bounds the requests of running futures without a lane. Some of these futures wait for a version that a lane will
    publish, so they must not use the memory that the lane needs."""
    patience: timedelta
    """Maximum wait of a lane for a missing position."""
    weight_of: Callable[[str], float] = equal_weight
    """Returns a tenant's weight, for both kinds of slots."""
    is_rate_limited: Callable[[str], bool] = never_rate_limited
    """Returns whether the futures of a tenant's lanes must wait; waiting futures use neither slots nor memory."""
    poll: timedelta = timedelta(seconds=1)
    """Interval between checks for tenants that are no longer rate-limited."""


class Runner:
    """Runs each added future once and settles it.

    Futures that still run when the runner is closed are not settled: they run again later, and executors ensure
    that no request takes effect twice. The runner is the `LaneListener` of its lanes.

    Concurrency: use it from one event loop.
    """

    def __init__(
        self,
        records: FutureRecords,
        capacity: FutureCapacity,
        executors: dict[str, Executor],
        limits: RunnerLimits,
        *,
        waiters: Waiters,
        is_shared: bool,
    ) -> None:
        self.records = records
        self.capacity = capacity
        self.waiters = waiters
        self.is_shared = is_shared
        """Whether other gateways share the database."""
        self.executors = executors
        """Executors by kind; more may be added until the first future arrives."""
        self.limits = limits
        self._lanes = Lanes(records.store, records.retry, patience=limits.patience, is_shared=is_shared, listener=self)
        self._ordered = FutureQueue(limits.lanes, weight_of=limits.weight_of, is_rate_limited=limits.is_rate_limited)
        self._unordered = FutureQueue(limits.unordered, weight_of=limits.weight_of)
        self._known: dict[str, Future] = {}
        self._running: dict[str, asyncio.Task[bytes]] = {}
        self._cancelled: set[str] = set()
        self._resumed: set[str] = set()
        """Ids of futures that another process may have run before."""
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._finished_logs: dict[object, set[str]] = {}
        self._next_poll: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.is_disowned = asyncio.Event()
        """Set once the store reports that another gateway owns a future; this runner must then be replaced."""

    def successor(self) -> 'Runner':
        """Return an empty runner with the same configuration."""
        return Runner(
            self.records, self.capacity, self.executors, self.limits, waiters=self.waiters, is_shared=self.is_shared
        )

    async def add(self, future: Future, *, is_resumed: bool = False) -> None:
        """Run a waiting future once its lane and the slots allow it. Adding it again has no effect."""
        if future.future_id in self._known or self._is_closed:
            return
        if is_resumed:
            self._resumed.add(future.future_id)
        self._known[future.future_id] = future
        self.capacity.enter_accepted(future)
        if not future.lane:
            self._unordered.add(future)
        elif await self._lanes.add(future) is not Admission.QUEUED:
            self.fail_passed(future)
        self._start_more()

    def find(self, future_id: str) -> Future | None:
        """Return a future that waits or runs here, as it was when it was added; None for other futures."""
        return self._known.get(future_id)

    @contextmanager
    def recording_finished(self) -> Iterator[set[str]]:
        """Collect the ids of the futures that finish during the block; rows that are read meanwhile may be outdated."""
        log = object()
        try:
            yield self._finished_logs.setdefault(log, set())
        finally:
            del self._finished_logs[log]

    def record_finished(self, future_id: str) -> None:
        """Add a finished future to the open `recording_finished` blocks."""
        for finished_ids in self._finished_logs.values():
            finished_ids.add(future_id)

    def check_gaps(self) -> None:
        """See `Lanes.check_gaps`."""
        self._lanes.check_gaps()

    async def cancel(self, future_id: str) -> None:
        """Stop a future if possible; an unknown future is ignored."""
        future = self._known.get(future_id)
        if future is None:
            return
        self._cancelled.add(future_id)
        task = self._running.get(future_id)
        if task is None and self._unordered.remove(future):
            self._spawn(self._settle_unstarted(future, Cancelled()))
        if task is not None and await self.executors[future.kind].stop(future):
            task.cancel()

    async def close(self) -> None:
        """Start no more futures, cancel the running ones, and wait up to a second for those that are being settled."""
        self._is_closed = True
        self._lanes.close()
        if self._next_poll is not None:
            self._next_poll.cancel()
        for task in self._running.values():
            task.cancel()
        # If the database is unreachable, the next process settles the rest.
        if self._background_tasks:
            await asyncio.wait(self._background_tasks, timeout=1)
        for background_task in self._background_tasks:
            background_task.cancel()
        # The process does not crash, so the attempts do not count.
        with suppress(DomainError, TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.gather(*map(self.records.attempts.end, self._known.values()))
        for future in self._known.values():
            self.capacity.leave(future)
        self._known.clear()

    def start(self, future: Future) -> None:
        self._ordered.add(future)
        self._start_more()

    def fail_passed(self, future: Future) -> None:
        self._spawn(self._settle_unstarted(future, PositionPassed(future.lane, future.position)))

    def fail_after_gap(self, futures: list[Future], missing: int) -> None:
        self._spawn(self._settle_after_gap(futures, missing))

    def _start_more(self) -> None:
        while not self._is_closed:
            future = self._ordered.take() or self._unordered.take()
            if future is None:
                self._schedule_poll()
                return
            task = asyncio.create_task(self._run(future), name=f'future-{future.future_id}')
            self._running[future.future_id] = task
            task.add_done_callback(partial(self._on_task_done, future))

    def _schedule_poll(self) -> None:
        """Check again later if futures of rate-limited tenants wait; no event reports the end of a rate limit."""
        if self._next_poll is None and self._ordered.has_rate_limited_tenant:
            self._next_poll = asyncio.get_running_loop().call_later(self.limits.poll.total_seconds(), self._poll)

    def _poll(self) -> None:
        self._next_poll = None
        self._start_more()

    async def _run(self, future: Future) -> bytes:
        if future.future_id in self._cancelled:
            raise Cancelled()
        executor = self.executors.get(future.kind)
        if executor is None:
            raise NotSupportedHere(what=f'a future of kind {future.kind!r}', engine='gateway')
        if future.future_id in self._resumed:
            await self.records.attempts.begin(future)
        gate = self.limits.memory if future.lane else self.limits.unordered_memory
        memory = gate.hold(future.tenant_id)
        try:
            await memory.grow(self.capacity.size_bytes(future))
            payload = await self.records.read_request(future)
            if future.future_id in self._cancelled:
                raise Cancelled()
            return await executor(future, payload)
        finally:
            memory.release()

    def _on_task_done(self, future: Future, task: asyncio.Task[bytes]) -> None:
        if self._is_closed:
            # The next process runs the future again, even if it just finished; operations return the recorded result.
            if not task.cancelled():
                task.exception()
            return
        del self._running[future.future_id]
        if not task.cancelled() and isinstance(task.exception(), FutureTaken):
            self.is_disowned.set()
            return
        self._spawn(self._settle_started(future, _outcome_of(future, task)))

    async def _settle_started(self, future: Future, outcome: Outcome) -> None:
        await self._settle(future, outcome)
        queue = self._ordered if future.lane else self._unordered
        queue.release(future)
        if future.lane:
            self._lanes.end(future)
        self._start_more()
        await self.records.delete_request(future)

    async def _settle_unstarted(self, future: Future, outcome: Outcome) -> None:
        """Settle a future that never had a slot."""
        await self._settle(future, outcome)
        await self.records.delete_request(future)

    async def _settle_after_gap(self, futures: list[Future], missing: int) -> None:
        # The last future is settled first: if the process is killed in between, the lane has passed the earlier ones,
        # so that they fail too.
        for future in reversed(futures):
            await self._settle_unstarted(future, PositionMissing(future.lane, future.position, missing))
        self._lanes.end(futures[-1])
        self._start_more()

    async def _settle(self, future: Future, outcome: Outcome) -> None:
        """Store an outcome and notify waiters."""
        stored = await self.records.settle(future, outcome)
        self.record_finished(future.future_id)
        _log.debug('future finished', future=future.future_id, state=stored.state, kind=future.kind)
        if self._known.pop(future.future_id, None) is not None:
            self.capacity.leave(future)
        self._cancelled.discard(future.future_id)
        self._resumed.discard(future.future_id)
        self.waiters.notify(stored)

    def _spawn(self, background_task: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(background_task)
        self._background_tasks.add(task)
        task.add_done_callback(self._on_background_done)

    def _on_background_done(self, background_task: asyncio.Task[None]) -> None:
        self._background_tasks.discard(background_task)
        error = None if background_task.cancelled() else background_task.exception()
        if isinstance(error, FutureTaken):
            self.is_disowned.set()
        elif error is not None:
            _log.error('future not settled', exc_info=error)


def _outcome_of(future: Future, task: asyncio.Task[bytes]) -> Outcome:
    if task.cancelled():
        return Cancelled()
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, DomainError):
        return error
    _log.error('unexpected error', future=future.future_id, kind=future.kind, exc_info=error)
    return Internal(future.future_id)
