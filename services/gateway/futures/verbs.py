"""The verbs of futures, as the APIs use them."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from functools import partial

from services.gateway.errors import FutureExpired, FutureNotFound
from services.gateway.futures.news import News, NewsKind
from services.gateway.futures.rules import Future, FutureRequest, FutureState
from services.gateway.futures.runner import Runner
from services.gateway.futures.world import World
from services.kit.errors import Draining
from services.kit.failpoints import reach

_PUBLISH_SECONDS = 60.0
"""Longest wait for a version to be published."""
_LARGE_BYTES = 1 << 18
"""A payload whose digest is made in a thread: more would hold up the event loop."""


class FutureVerbs:
    """Implements `ports.Futures`."""

    def __init__(self, world: World, runner: Runner, *, last: timedelta = timedelta(seconds=1)) -> None:
        """Accept what `runner` carries out; what is being accepted when this is closed has `last` to be."""
        self._last_seconds = last.total_seconds()
        self._world = world
        self._runner = runner
        self._owner = ''
        self._elsewhere: dict[str, Future] = {}
        """Accepted here and carried out by other gateways: they take room here until they are finished."""
        self._accepting: set[asyncio.Task[Future]] = set()
        self._is_closed = False

    @property
    def has_lost(self) -> asyncio.Event:
        """Set when another gateway is found to carry out what this one should."""
        return self._runner.has_lost

    async def begin_term(self, owner: str) -> None:
        """Carry out what is the `owner`'s from now on, and leave all else to others; `resume` what there is of it."""
        former, self._runner, self._owner = self._runner, self._runner.anew(), owner
        await former.close()

    async def submit(self, order: FutureRequest) -> Future:
        """Accept a request of the current caller, durably; the same key again returns the same future.

        Raises:
            RequestIdReused: the key was used for something else.
            QueueFull: the tenant has too many that wait, or all have.
            Draining: this gateway is shutting down.
            ServiceUnreachable: it could not be made durable.
        """
        if self._is_closed:
            raise Draining()
        future = await self._future_of(order)
        known = self._runner.find(future.future_id)
        if known is None:
            # A caller that goes away in the middle must not leave a row behind that nobody carries out.
            task = asyncio.create_task(self._accept(future, order.payload))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)
            try:
                known = await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise Draining() from None
                raise
        known.check_repeat(future.fingerprint)
        return known

    async def wait(self, future_id: str, *, seconds: float) -> Future:
        """Return the caller's future when it is finished, or as it is when the time is up.

        Raises:
            FutureNotFound: there is none.
            FutureExpired: there is none any more.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + seconds
        while True:
            with self._world.bulletin.listening(future_id) as news:
                future = self._here(future_id) or await self._find(future_id)
                left = give_up_at - loop.time()
                if future.is_finished or left <= 0 or self._is_closed:
                    return future
                await asyncio.wait({news}, timeout=left)
                if news.done() and (told := news.result()) is not None:
                    return told

    async def published_result(self, future_id: str) -> bytes | None:
        """Wait up to a minute for a future of the caller and return its result; None if it is not finished.

        Raises:
            FutureNotFound, FutureExpired: See `wait`.
            DomainError: The error that the future failed with.
        """
        future = await self.wait(future_id, seconds=_PUBLISH_SECONDS)
        return await self.result(future) if future.is_finished else None

    async def payload(self, future: Future) -> bytes:
        """Return what was asked, of a future that is not finished.

        Raises:
            FutureExpired: it is finished; what is needed afterwards belongs into its note.
        """
        return await self._read(future, future.payload_name)

    async def result(self, future: Future) -> bytes:
        """Return the result of a future that is done.

        Raises:
            DomainError: why it failed.
            FutureExpired: it is no longer kept.
        """
        if future.error is not None:
            raise future.error
        return await self._read(future, future.result_name)

    async def result_bytes(self, future: Future) -> int:
        """Return how many bytes the result of a future has; 0 where there is none."""
        return await self._world.payloads.size(future.result_name)

    async def cancel(self, future_id: str) -> None:
        """Stop a future where that can be done; one that is finished stays as it is.

        Raises:
            FutureNotFound, FutureExpired: as `wait`.
        """
        future = await self._find(future_id)
        peers = self._world.peers
        if peers is None or future.is_finished or future.owner == self._owner:
            await self._runner.cancel(future_id)
            return
        await peers.tell(
            News(kind=NewsKind.CANCELLED, owner=future.owner, tenant_id=future.tenant_id, future_id=future_id)
        )

    async def resume(self) -> int:
        """Carry on with all that wait for this gateway and are not known here; return how many wait."""
        store, owner = self._world.store, self._owner
        with self._runner.noting_ends() as ended:
            waiting = await self._world.persistence.insist(partial(store.list_waiting, owner))
            waiting = [future for future in waiting if future.future_id not in ended]
        for future in waiting:
            await self._carry_on(future)
        self._runner.look_again()
        return len(waiting)

    async def hear(self, news: News) -> None:
        """Do what news from other gateways ask for."""
        match news.kind:
            case NewsKind.ACCEPTED if news.owner == self._owner:
                await self._take_up(news)
            case NewsKind.CANCELLED if news.owner == self._owner:
                await self._runner.cancel(news.future_id)
            case NewsKind.FINISHED:
                await self._hear_end(news)
            case NewsKind.MISSED:
                await self._catch_up()
            case _:
                pass

    def begin_stop(self) -> None:
        """Accept nothing more, and let nobody wait any longer."""
        self._is_closed = True
        self._world.bulletin.close()

    async def close(self) -> None:
        """Stop, and leave what is not finished to the next process."""
        self.begin_stop()
        # What is kept by now is carried on with by the next process; the rest is refused, or a database that is away
        # would be waited for without end.
        if self._accepting:
            _, late = await asyncio.wait(self._accepting, timeout=self._last_seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=self._last_seconds)
        await self._runner.close()

    async def _future_of(self, order: FutureRequest) -> Future:
        world = self._world
        make = partial(Future.accepted, order, tenant_id=world.caller().tenant_id, moment=world.clock.now())
        future = await asyncio.to_thread(make) if len(order.payload) > _LARGE_BYTES else make()
        return replace(future, owner=self._owner)

    async def _accept(self, future: Future, payload: bytes) -> Future:
        world = self._world
        world.room.enter(future, len(payload))
        try:
            await world.payloads.put(future.payload_name, payload)
            reach('future.payload')
            with self._runner.noting_ends() as ended:
                kept = await world.store.add_if_absent(future)
            reach('future.row')
            if kept.future_id not in ended:
                self._note_elsewhere(kept, len(payload))
            if kept is future and kept.owner == self._owner:
                await self._runner.add(future)
                return future
        finally:
            # What is carried out is held by the runner.
            world.room.leave(future)
        # It was accepted before, by another process or long ago, or another call with the same key was faster.
        if not kept.is_finished and kept.future_id not in ended:
            await self._carry_on(kept)
        if kept.is_finished or kept.fingerprint != future.fingerprint:
            await world.payloads.delete(future.payload_name)
        return kept

    async def _carry_on(self, future: Future) -> None:
        """Have a waiting future carried out that was accepted before, unless it is being so."""
        if self._runner.find(future.future_id) is not None:
            return
        with self._runner.noting_ends() as ended:
            size_bytes = await self._world.persistence.insist(partial(self._world.payloads.size, future.payload_name))
        if future.owner != self._owner or future.future_id in ended:
            return
        self._world.room.enter_anyway(future, size_bytes)
        try:
            await self._runner.add(future)
        finally:
            self._world.room.leave(future)

    # What is carried out elsewhere

    def _note_elsewhere(self, future: Future, size_bytes: int) -> None:
        if future.is_finished or future.owner == self._owner or future.future_id in self._elsewhere:
            return
        self._elsewhere[future.future_id] = future
        self._world.room.enter_anyway(future, size_bytes)

    def _forget_elsewhere(self, future_id: str) -> None:
        if (future := self._elsewhere.pop(future_id, None)) is not None:
            self._world.room.leave(future)

    async def _take_up(self, news: News) -> None:
        """Carry out what another gateway accepted for this one."""
        with self._runner.noting_ends() as ended:
            future = await self._world.store.get(news.tenant_id, news.future_id)
            if future is None or future.is_finished or future.future_id in ended:
                return
        await self._carry_on(future)

    async def _hear_end(self, news: News) -> None:
        """Tell those who wait here of a future that was finished elsewhere, or by now here."""
        self._runner.note_end(news.future_id)
        self._forget_elsewhere(news.future_id)
        bulletin = self._world.bulletin
        if not (bulletin.is_awaited(news.future_id) or bulletin.is_awaited(news.topic)):
            return
        future = await self._world.store.get(news.tenant_id, news.future_id)
        if future is not None and future.is_finished:
            bulletin.tell(future)

    async def _catch_up(self) -> None:
        """Look for everything that may have been told meanwhile."""
        await self.resume()
        for future in list(self._elsewhere.values()):
            kept = await self._world.store.get(future.tenant_id, future.future_id)
            if kept is None or kept.is_finished or kept.owner == self._owner:
                self._forget_elsewhere(future.future_id)
        self._world.bulletin.wake_all()

    def _here(self, future_id: str) -> Future | None:
        """Return the caller's future that waits or runs here: no database need be asked for it."""
        future = self._runner.find(future_id)
        return future if future is not None and future.tenant_id == self._world.caller().tenant_id else None

    async def _find(self, future_id: str) -> Future:
        future = await self._world.store.get(self._world.caller().tenant_id, future_id)
        if future is None:
            raise FutureNotFound(future_id)
        if future.state is FutureState.EXPIRED:
            raise FutureExpired(future_id)
        return future

    async def _read(self, future: Future, name: str) -> bytes:
        data = await self._world.payloads.get(name)
        if data is None:
            raise FutureExpired(future.future_id)
        return data
