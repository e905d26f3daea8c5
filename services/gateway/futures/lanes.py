"""All lanes that something happens in: what comes is put in its place, and gaps are given up in time.

Where several gateways share a database, a lane is one gateway's only while something waits or runs in it, so one that
falls idle is forgotten at once, and where it goes on is read anew. Before a gap is given up, it is read again.
"""

import asyncio
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from services.gateway.futures.lane import Lane, Place
from services.gateway.futures.persistence import Persistence
from services.gateway.futures.ports import FutureStore
from services.gateway.futures.rules import Future

_REMEMBERED = 1000
"""Idle lanes in memory before the longest idle are forgotten."""
_IDLE_SECONDS = 600.0
"""How long a lane is idle at least before it is forgotten; far longer than its end takes to read."""

_Key = tuple[str, str]


class Turns(Protocol):
    """Hears what is to become of futures."""

    def begin(self, future: Future) -> None:
        """Carry a future out whose turn it is; `end` it when it is settled."""
        ...

    def give_up(self, futures: list[Future], missing: int) -> None:
        """Fail futures, because of the position they waited for; `end` the last when all are settled."""
        ...

    def passed(self, future: Future) -> None:
        """Fail a future whose lane went on without it."""
        ...


class Lanes:
    """Lanes by tenant and name. For one event loop."""

    def __init__(
        self,
        store: FutureStore,
        persistence: Persistence,
        *,
        patience: timedelta,
        is_shared: bool,
        turns: Turns,
    ) -> None:
        """Begin without any.

        Args:
            store: knows where lanes go on.
            persistence: reads it again where it does not answer.
            patience: how long the first future in waiting waits for an earlier position, while nothing runs.
            is_shared: whether other gateways may carry futures of the same lanes out.
            turns: hears what is to become of futures.
        """
        self._store = store
        self._persistence = persistence
        self._patience = patience.total_seconds()
        self._is_shared = is_shared
        self._turns = turns
        self._lanes: dict[_Key, Lane] = {}
        self._opening: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()
        self._timers: dict[_Key, asyncio.TimerHandle] = {}
        self._looking: set[asyncio.Task[None]] = set()

    async def add(self, future: Future) -> Place:
        """Put a future in its place; it begins when it is its turn."""
        key = _key_of(future)
        opening = self._opening.setdefault(key, asyncio.Lock())
        async with opening:
            lane = self._lanes.get(key) or await self._open(key)
        place = lane.add(future, now=_now())
        self._go_on(key, lane)
        return place

    def end(self, future: Future) -> None:
        """Go on after a future that is settled."""
        key = _key_of(future)
        lane = self._lanes[key]
        lane.end(now=_now())
        self._go_on(key, lane)

    def look_again(self) -> None:
        """Read again where those lanes go on that wait for a position."""
        for key in list(self._timers):
            self._look_at(key)

    def close(self) -> None:
        """Give up no more gaps."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._looking:
            task.cancel()

    async def _open(self, key: _Key) -> Lane:
        next_position = await self._persistence.insist(partial(self._store.next_position, *key))
        if len(self._lanes) > _REMEMBERED:
            self._forget_idle()
        lane = self._lanes[key] = Lane(next_position, now=_now())
        return lane

    def _go_on(self, key: _Key, lane: Lane) -> None:
        if (future := lane.begin()) is not None:
            self._turns.begin(future)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if (end := lane.gap_ends(self._patience)) is not None:
            self._timers[key] = asyncio.get_running_loop().call_at(end, self._look_at, key)
        elif self._is_shared and lane.idle_since() is not None:
            del self._lanes[key]

    def _look_at(self, key: _Key) -> None:
        task = asyncio.create_task(self._look(key, self._lanes[key]))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _look(self, key: _Key, lane: Lane) -> None:
        """Skip what was finished elsewhere, and give a gap up whose time has come."""
        next_position = await self._persistence.insist(partial(self._store.next_position, *key))
        if self._lanes.get(key) is not lane or lane.is_running:
            return
        for passed in lane.skip_to(next_position):
            self._turns.passed(passed)
        end = lane.gap_ends(self._patience)
        if end is None or end > _now():
            self._go_on(key, lane)
            return
        with suppress(KeyError):
            self._timers.pop(key).cancel()
        missing = lane.next_position
        self._turns.give_up(lane.give_up(), missing)

    def _forget_idle(self) -> None:
        limit = _now() - _IDLE_SECONDS
        idle = [key for key, lane in self._lanes.items() if (lane.idle_since() or limit) < limit]
        for key in idle:
            del self._lanes[key]


def _key_of(future: Future) -> _Key:
    return future.tenant_id, future.lane


def _now() -> float:
    return asyncio.get_running_loop().time()
