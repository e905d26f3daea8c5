"""Carries futures out: those of a lane one after the other, all others as there are places for them.

What is in memory of a future that waits is its record; its request is read when its turn comes.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import structlog

from services.gateway.errors import PayloadLost, PositionMissing, PositionPassed
from services.gateway.futures.lane import Place
from services.gateway.futures.lanes import Lanes
from services.gateway.futures.ports import Executor
from services.gateway.futures.queue import FutureQueue, never
from services.gateway.futures.rules import Bounds, Future, FutureTaken
from services.gateway.futures.world import World
from services.gateway.sampling.slots import equal_weight
from services.kit.errors import Cancelled, DomainError, Internal, NotSupportedHere
from services.kit.failpoints import reach

_log = structlog.get_logger('futures')

Outcome = bytes | DomainError


@dataclass(frozen=True, kw_only=True)
class RunnerLimits:
    """How much runs at a time of each base model, and how long a lane waits for what is missing."""

    lanes: Bounds
    unordered: Bounds
    patience: timedelta
    weight_of: Callable[[str], float] = equal_weight
    """Of a tenant, in both."""
    is_held: Callable[[str], bool] = never
    """Whether futures of a tenant's lanes begin later: they hold neither places nor memory until then."""
    look: timedelta = timedelta(seconds=1)
    """Between two looks whether tenants are still held."""


class Runner:
    """Runs what it is given, once each, and settles it. For one event loop.

    What runs when it is closed is not settled: it is run again from the beginning by the next process, and
    executors see to it that nothing happens twice.
    """

    def __init__(self, world: World, executors: Mapping[str, Executor], limits: RunnerLimits) -> None:
        """Run with `executors`, by kind; others may be added to the mapping until the first future comes."""
        self._world = world
        self._executors = executors
        self._limits = limits
        self._insist = world.persistence.insist
        self._lanes = Lanes(
            world.store, world.persistence, patience=limits.patience, is_shared=world.peers is not None, turns=self
        )
        self._ordered = FutureQueue(limits.lanes, weight_of=limits.weight_of, is_held=limits.is_held)
        self._unordered = FutureQueue(limits.unordered, weight_of=limits.weight_of)
        self._known: dict[str, Future] = {}
        self._running: dict[str, asyncio.Task[bytes]] = {}
        self._cancelled: set[str] = set()
        self._chores: set[asyncio.Task[None]] = set()
        self._notes: dict[object, set[str]] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.has_lost = asyncio.Event()
        """Set where another gateway carries out what this one should; it is of no use any more."""

    def anew(self) -> 'Runner':
        """Return another one of the same kind, with nothing to do."""
        return Runner(self._world, self._executors, self._limits)

    async def add(self, future: Future) -> None:
        """Carry a future out that waits, when its turn comes. Again is no error."""
        if future.future_id in self._known or self._is_closed:
            return
        self._known[future.future_id] = future
        self._world.room.enter_anyway(future)
        if not future.lane:
            self._unordered.add(future)
        elif await self._lanes.add(future) is not Place.TAKEN:
            self.passed(future)
        self._begin_more()

    def find(self, future_id: str) -> Future | None:
        """Return a future that waits or runs here, as it was accepted; None where it does not."""
        return self._known.get(future_id)

    @contextmanager
    def noting_ends(self) -> Iterator[set[str]]:
        """Gather the ids of futures that end in this block: what is read in it may be older."""
        note = object()
        try:
            yield self._notes.setdefault(note, set())
        finally:
            del self._notes[note]

    def note_end(self, future_id: str) -> None:
        """Let those know who note ends that a future is finished."""
        for note in self._notes.values():
            note.add(future_id)

    def look_again(self) -> None:
        """Read again where lanes go on that wait for a position."""
        self._lanes.look_again()

    async def cancel(self, future_id: str) -> None:
        """Stop a future where that can be done; one that is not here is no error."""
        future = self._known.get(future_id)
        if future is None:
            return
        self._cancelled.add(future_id)
        task = self._running.get(future_id)
        if task is None and self._unordered.remove(future):
            self._do(self._settle_apart(future, Cancelled()))
        if task is not None and await self._executors[future.kind].stop(future):
            task.cancel()

    async def close(self) -> None:
        """Begin nothing more, leave what runs, and complete what is being settled."""
        self._is_closed = True
        self._lanes.close()
        if self._next_look is not None:
            self._next_look.cancel()
        for task in self._running.values():
            task.cancel()
        # What cannot be settled soon, for want of a database, is settled by the next process.
        if self._chores:
            await asyncio.wait(self._chores, timeout=1)
        for chore in self._chores:
            chore.cancel()
        for future in self._known.values():
            self._world.room.leave(future)
        self._known.clear()

    # What becomes of those in lanes

    def begin(self, future: Future) -> None:
        """Carry a future out as soon as there is a place."""
        self._ordered.add(future)
        self._begin_more()

    def passed(self, future: Future) -> None:
        """Fail a future whose lane went on without it."""
        self._do(self._settle_apart(future, PositionPassed(future.lane, future.position)))

    def give_up(self, futures: list[Future], missing: int) -> None:
        """Fail futures that waited for a position which does not come."""
        self._do(self._fail_behind_gap(futures, missing))

    # Beginning

    def _begin_more(self) -> None:
        while not self._is_closed:
            future = self._ordered.take() or self._unordered.take()
            if future is None:
                self._plan_look()
                return
            task = asyncio.create_task(self._carry_out(future), name=f'future-{future.future_id}')
            self._running[future.future_id] = task
            task.add_done_callback(partial(self._ended, future))

    def _plan_look(self) -> None:
        """See to it that those begin who are held now: nothing tells when they no longer are."""
        if self._next_look is None and self._ordered.has_held:
            self._next_look = asyncio.get_running_loop().call_later(self._limits.look.total_seconds(), self._look)

    def _look(self) -> None:
        self._next_look = None
        self._begin_more()

    async def _carry_out(self, future: Future) -> bytes:
        if future.future_id in self._cancelled:
            raise Cancelled()
        executor = self._executors.get(future.kind)
        if executor is None:
            raise NotSupportedHere(what=f'a future of kind {future.kind!r}', engine='gateway')
        world = self._world
        memory = (world.memory if future.lane else world.unordered_memory).hold(future.tenant_id)
        try:
            await memory.grow(world.room.size_bytes(future))
            payload = await self._insist(partial(world.payloads.get, future.payload_name))
            if payload is None:
                raise PayloadLost(future.future_id)
            if future.future_id in self._cancelled:
                raise Cancelled()
            return await executor(future, payload)
        finally:
            memory.release()

    # Ending

    def _ended(self, future: Future, task: asyncio.Task[bytes]) -> None:
        if self._is_closed:
            # It is left to the next process, also where it was just done: its outcome is on record elsewhere.
            if not task.cancelled():
                task.exception()
            return
        del self._running[future.future_id]
        if not task.cancelled() and isinstance(task.exception(), FutureTaken):
            self.has_lost.set()
            return
        self._do(self._settle_in_turn(future, _outcome_of(future, task)))

    async def _settle_in_turn(self, future: Future, outcome: Outcome) -> None:
        await self._settle(future, outcome)
        queue = self._ordered if future.lane else self._unordered
        queue.release(future)
        if future.lane:
            self._lanes.end(future)
        self._begin_more()
        await self._insist(partial(self._world.payloads.delete, future.payload_name))

    async def _settle_apart(self, future: Future, outcome: Outcome) -> None:
        """Settle a future that never had a place."""
        await self._settle(future, outcome)
        await self._insist(partial(self._world.payloads.delete, future.payload_name))

    async def _fail_behind_gap(self, futures: list[Future], missing: int) -> None:
        # The last one first: after a kill in the middle, those before it have been passed, and fail as well.
        for future in reversed(futures):
            await self._settle_apart(future, PositionMissing(future.lane, future.position, missing))
        self._lanes.end(futures[-1])
        self._begin_more()

    async def _settle(self, future: Future, outcome: Outcome) -> None:
        """Keep an outcome and tell it: the result before the row, so that a row that says DONE has one."""
        if isinstance(outcome, bytes):
            await self._insist(partial(self._world.payloads.put, future.result_name, outcome))
            reach('future.result')
        kept = await self._insist(partial(self._keep_outcome, future, outcome))
        reach('future.settled')
        if kept.owner != future.owner:
            raise FutureTaken
        self.note_end(future.future_id)
        _log.debug('future finished', future=future.future_id, state=kept.state, kind=future.kind)
        if self._known.pop(future.future_id, None) is not None:
            self._world.room.leave(future)
        self._cancelled.discard(future.future_id)
        self._world.bulletin.tell(kept)

    async def _keep_outcome(self, future: Future, outcome: Outcome) -> Future:
        # Each attempt has its own moment: who follows a topic looks back but seconds for what it missed.
        moment = self._world.clock.now()
        is_done = isinstance(outcome, bytes)
        finished = future.done(moment=moment) if is_done else future.failed(outcome, moment=moment)
        return await self._world.store.settle(finished)

    def _do(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._done)

    def _done(self, chore: asyncio.Task[None]) -> None:
        self._chores.discard(chore)
        error = None if chore.cancelled() else chore.exception()
        if isinstance(error, FutureTaken):
            self.has_lost.set()
        elif error is not None:
            _log.error('a future could not be settled', exc_info=error)


def _outcome_of(future: Future, task: asyncio.Task[bytes]) -> Outcome:
    if task.cancelled():
        return Cancelled()
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, DomainError):
        return error
    _log.error('unforeseen error', future=future.future_id, kind=future.kind, exc_info=error)
    return Internal(future.future_id)
