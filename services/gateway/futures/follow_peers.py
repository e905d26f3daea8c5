"""The verb that keeps this gateway's place among those on one database, and shares the work with them."""

import asyncio
from contextlib import aclosing, suppress
from datetime import timedelta
from typing import Never

import structlog

from services.gateway.futures.news import NewsKind
from services.gateway.futures.peer_ports import Peers
from services.gateway.futures.persistence import Persistence
from services.gateway.futures.verbs import FutureVerbs
from services.kit.errors import DomainError

_LASTED_SECONDS = 60.0
"""From when on a connection for news counts as one that stood."""
_LOOKS_EVERY = 10
"""Beats between two looks for work that nobody told of, in case that something is wrong with the news."""

_log = structlog.get_logger('peers')


class FollowPeers:
    """Joins, stays, and joins again where its place was lost; hears the news, and takes up what the dead have left.

    Concurrency: one task runs `__call__`, between `join` and `leave`.
    """

    def __init__(self, peers: Peers, verbs: FutureVerbs, persistence: Persistence, *, beat: timedelta) -> None:
        """Share what `verbs` carries out with `peers`; say every `beat` that this gateway is there."""
        self._peers = peers
        self._verbs = verbs
        self._hold = persistence.hold
        self._beat_seconds = beat.total_seconds()
        self._gateway_id = ''
        self._listening: asyncio.Task[Never] | None = None

    async def join(self) -> None:
        """Take a place; from now on futures can be accepted.

        Raises:
            PayloadsNotShared: a gateway that is there keeps payloads in another folder.
            ServiceUnreachable: the database does not answer.
        """
        self._gateway_id = await self._peers.join()
        await self._verbs.begin_term(self._gateway_id)

    async def leave(self) -> None:
        """Give the place up, so that others carry on at once with what is left; without a database they find out."""
        with suppress(DomainError):
            await self._peers.leave(self._gateway_id)

    async def __call__(self) -> Never:
        """Share the work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            beats, failures = 0, 0
            while True:
                if self._listening is None or self._listening.done():
                    self._listening = tasks.create_task(self._listen(self._gateway_id))
                try:
                    await self._beat(is_look=beats % _LOOKS_EVERY == 0)
                    failures = 0
                except DomainError as error:
                    _log.info('the place among gateways could not be kept', reason=error.reason)
                    await self._hold(failures)
                    failures += 1
                beats += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._verbs.has_lost.wait(), self._beat_seconds)

    async def _beat(self, *, is_look: bool) -> None:
        is_kept = not self._verbs.has_lost.is_set() and await self._peers.renew(self._gateway_id)
        if not is_kept:
            await self._join_again()
        if await self._peers.adopt(self._gateway_id) or is_look or not is_kept:
            await self._verbs.resume()

    async def _join_again(self) -> None:
        """Begin anew: what was under way here is carried out by others, or adopted."""
        _log.warning('this gateway was taken for dead, and begins anew', gateway=self._gateway_id)
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        # It may still have the place, where only a future was lost.
        await self._peers.leave(self._gateway_id)
        await self.join()

    async def _listen(self, gateway_id: str) -> Never:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            begin = loop.time()
            try:
                await self._hear_all(gateway_id)
            except DomainError as error:
                _log.info('news are not heard', reason=error.reason)
            # A connection that lasted is no failure: the next one is tried at once.
            failures = 0 if loop.time() - begin > _LASTED_SECONDS else failures + 1
            await self._hold(failures)

    async def _hear_all(self, gateway_id: str) -> None:
        async with aclosing(self._peers.listen(gateway_id)) as told:
            async for news in told:
                if news.kind is NewsKind.LEFT and await self._peers.adopt(gateway_id):
                    await self._verbs.resume()
                await self._verbs.hear(news)
