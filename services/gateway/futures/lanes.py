"""Lanes: futures that run one after the other, in the order of their positions.

`Lane` contains the rules of one lane and does no I/O. `Lanes` contains the lanes in use, and gives up missing positions
after a time limit.
"""

import asyncio
from contextlib import suppress
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from twinkle_services.gateway.futures.ports import FutureStore
from twinkle_services.gateway.futures.rules import Future
from twinkle_services.kit.retry import Retry

_MAX_IDLE = 1000
"""Number of lanes in memory above which idle lanes are dropped."""
_IDLE_SECONDS = 600.0
"""Idle time after which an unshared lane may be dropped; by then, its last position can be read from the store."""

_Key = tuple[str, str]


class Admission(Enum):
    """Decision on a future that arrived in a lane."""

    QUEUED = auto()
    """The future waits for its turn."""
    KNOWN = auto()
    """The future arrived before."""
    PASSED = auto()
    """Another future has or had the position, or the lane gave up the position."""


class Lane:
    """Futures of one lane. Each future starts after the previous one has finished.

    Times are seconds on the caller's clock.
    """

    def __init__(self, next_position: int = 0, *, now: float) -> None:
        self.next_position = next_position
        """All earlier positions are finished or were given up."""
        self._waiting: dict[int, Future] = {}
        self._arrival_times: dict[int, float] = {}
        self._running: str | None = None
        self._idle_since = now

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def idle_since(self) -> float | None:
        """Return the time at which the lane became idle; None if a future runs or waits."""
        return None if self._running is not None or self._waiting else self._idle_since

    def add(self, future: Future, *, now: float) -> Admission:
        """Add a future; the futures of a lane may arrive in any order."""
        waiting = self._waiting.get(future.position)
        if future.future_id in (self._running, waiting.future_id if waiting else None):
            return Admission.KNOWN
        # Two futures at one position are different requests; the earlier one keeps the position.
        if future.position < self.next_position + self.is_running or waiting is not None:
            return Admission.PASSED
        self._waiting[future.position] = future
        self._arrival_times[future.position] = now
        return Admission.QUEUED

    def start(self) -> Future | None:
        """Start the next future and return it; None if a future is running or the next position is missing."""
        if self._running is not None or self.next_position not in self._waiting:
            return None
        future = self._take(self.next_position)
        self._running = future.future_id
        return future

    def end(self, *, now: float) -> None:
        """Advance to the next position after the running future was settled."""
        self._running = None
        self.next_position += 1
        self._idle_since = now

    def skip_to(self, position: int) -> list[Future]:
        """Advance to at least `position` while no future runs; return the waiting futures that are skipped."""
        self.next_position = max(self.next_position, position)
        passed = [waiting for waiting in sorted(self._waiting) if waiting < self.next_position]
        return [self._take(waiting) for waiting in passed]

    def gap_deadline(self, patience: float) -> float | None:
        """Return the time at which to give up a missing position; None if no position is missing.

        Args:
            patience: seconds that the first waiting future waits, from its arrival or from the end of the previous
                future, whichever is later.
        """
        if self._running is not None or not self._waiting or self.next_position in self._waiting:
            return None
        return max(self._arrival_times[min(self._waiting)], self._idle_since) + patience

    def give_up(self) -> list[Future]:
        """Remove and return, in order, the futures directly after the gap. Fail all of them, and then call `end` once.

        They were submitted to run after the missing future, and without that future their effect would differ.
        """
        failed = [self._take(min(self._waiting))]
        while failed[-1].position + 1 in self._waiting:
            failed.append(self._take(failed[-1].position + 1))
        self._running = failed[-1].future_id
        self.next_position = failed[-1].position
        return failed

    def _take(self, position: int) -> Future:
        del self._arrival_times[position]
        return self._waiting.pop(position)


class LaneListener(Protocol):
    """Acts on the decisions of lanes."""

    def start(self, future: Future) -> None:
        """Run the next future of a lane; call `Lanes.end` when it is settled."""
        ...

    def fail_after_gap(self, futures: list[Future], missing: int) -> None:
        """Fail futures because of the missing position; call `Lanes.end` for the last one when all are settled."""
        ...

    def fail_passed(self, future: Future) -> None:
        """Fail a future whose lane advanced without it."""
        ...


class Lanes:
    """Lanes by tenant and name.

    A lane belongs to one gateway only while futures wait or run in it. If other gateways may run its futures
    (`is_shared`), an idle lane is therefore dropped immediately, and its position is read again when it is needed. A
    lane gives up a gap after a future has waited for `patience` and the position has been read again.

    Concurrency: use it from one event loop.
    """

    def __init__(
        self, store: FutureStore, retry: Retry, *, patience: timedelta, is_shared: bool, listener: LaneListener
    ) -> None:
        self._store = store
        self._retry = retry
        self._patience = patience.total_seconds()
        self._is_shared = is_shared
        self._listener = listener
        self._lanes: dict[_Key, Lane] = {}
        self._opening: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()
        self._timers: dict[_Key, asyncio.TimerHandle] = {}
        self._checks: set[asyncio.Task[None]] = set()

    async def add(self, future: Future) -> Admission:
        """Add a future to its lane, which starts the future when its turn comes."""
        key = _key_of(future)
        async with self._opening.setdefault(key, asyncio.Lock()):
            lane = self._lanes.get(key) or await self._open(key)
        admission = lane.add(future, now=_now())
        self._advance(key, lane)
        return admission

    def end(self, future: Future) -> None:
        """Advance a lane after a future was settled."""
        key = _key_of(future)
        lane = self._lanes[key]
        lane.end(now=_now())
        self._advance(key, lane)

    def check_gaps(self) -> None:
        """Check the lanes that wait for a missing position, which another gateway may have finished."""
        for key in list(self._timers):
            self._check_later(key)

    def close(self) -> None:
        """Cancel all timers and checks of gaps."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._checks:
            task.cancel()

    async def _open(self, key: _Key) -> Lane:
        next_position = await self._retry.call(partial(self._store.next_position, *key))
        if len(self._lanes) > _MAX_IDLE:
            self._drop_idle()
        lane = self._lanes[key] = Lane(next_position, now=_now())
        return lane

    def _advance(self, key: _Key, lane: Lane) -> None:
        if (future := lane.start()) is not None:
            self._listener.start(future)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if (end := lane.gap_deadline(self._patience)) is not None:
            self._timers[key] = asyncio.get_running_loop().call_at(end, self._check_later, key)
        elif self._is_shared and lane.idle_since() is not None:
            del self._lanes[key]

    def _check_later(self, key: _Key) -> None:
        task = asyncio.create_task(self._check(key, self._lanes[key]))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check(self, key: _Key, lane: Lane) -> None:
        """Skip the positions that other gateways finished, and give up a gap whose deadline has passed."""
        next_position = await self._retry.call(partial(self._store.next_position, *key))
        if self._lanes.get(key) is not lane or lane.is_running:
            return
        for passed in lane.skip_to(next_position):
            self._listener.fail_passed(passed)
        end = lane.gap_deadline(self._patience)
        if end is None or end > _now():
            self._advance(key, lane)
            return
        with suppress(KeyError):
            self._timers.pop(key).cancel()
        missing = lane.next_position
        self._listener.fail_after_gap(lane.give_up(), missing)

    def _drop_idle(self) -> None:
        limit = _now() - _IDLE_SECONDS
        for key in [key for key, lane in self._lanes.items() if (lane.idle_since() or limit) < limit]:
            del self._lanes[key]


def _key_of(future: Future) -> _Key:
    return future.tenant_id, future.lane


def _now() -> float:
    return asyncio.get_running_loop().time()
