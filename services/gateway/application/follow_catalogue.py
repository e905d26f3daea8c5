"""The verb that keeps the catalogue's copy of another service's entries up to date, for ever.

A copy is made from a snapshot and then from changes. Where the stream breaks, it goes on after the
last event; where that does not work at once, a new snapshot is taken, which is right whatever was missed.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Generic, Never, TypeVar

import structlog

from services.gateway.domain.catalogue import CatalogueEvent, Gone, Seen, Synced
from services.gateway.ports import Feed, PositionStore, Shelf
from services.kit.clock import Clock
from services.kit.errors import DomainError

Entry = TypeVar('Entry')

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
POSITION_INTERVAL_SECONDS = 5.0
"""How often the position is written down at most: losing one only means hearing some events again."""

_log = structlog.get_logger('catalogue')


class FollowCatalogue(Generic[Entry]):
    """Copies one feed to one shelf.

    Concurrency: one task runs `__call__`; several gateways may copy the same feed to one store.
    """

    def __init__(
        self,
        name: str,
        *,
        feed: Feed[Entry],
        shelf: Shelf[Entry],
        positions: PositionStore,
        clock: Clock,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Copy `feed` to `shelf`.

        Args:
            name: names the feed's position in `positions`.
            feed: what to follow.
            shelf: where the copy is kept.
            positions: where to begin, across restarts.
            clock: tells when entries were found gone.
            pause: waits for some seconds before another attempt.
        """
        self._name = name
        self._feed = feed
        self._shelf = shelf
        self._positions = positions
        self._clock = clock
        self._pause = pause
        self._token = ''
        self._was_heard = False
        self._saved_at: float | None = None

    async def __call__(self) -> Never:
        """Follow the feed until cancelled."""
        failures = 0
        is_begun = False
        while True:
            self._was_heard = False
            try:
                if not is_begun:
                    self._token = await self._positions.load(self._name)
                    is_begun = True
                await self._follow()
                _log.info('feed ended', feed=self._name)
            except DomainError as error:
                _log.info('feed broke', feed=self._name, reason=error.reason)
            failures = 0 if self._was_heard else failures + 1
            if not self._was_heard:
                # Not heard at all: the service is away or new, and may know nothing of the token.
                self._token = ''
            limit = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(failures, 10))
            await self._pause(limit * random.uniform(0.5, 1.0))

    async def _follow(self) -> None:
        present: set[str] | None = None if self._token else set()
        async for event in self._feed.follow(self._token):
            self._was_heard = True
            present = await self._copy(event, present)
            # Half a snapshot is no position to go on from.
            if present is None:
                await self._move_to(event.resume_token, is_urgent=isinstance(event, Synced))

    async def _copy(self, event: CatalogueEvent[Entry], present: set[str] | None) -> set[str] | None:
        """Apply one event; return `present`, the ids of the snapshot so far, and None once it is complete."""
        match event:
            case Seen():
                await self._shelf.save(event.entry)
                if present is not None:
                    present.add(event.entry_id)
                return present
            case Gone():
                await self._shelf.mark_gone(event.entry_id, moment=self._clock.now())
                if present is not None:
                    present.discard(event.entry_id)
                return present
            case Synced():
                if present is not None:
                    await self._shelf.mark_absent_gone(present, moment=self._clock.now())
                return None

    async def _move_to(self, token: str, *, is_urgent: bool) -> None:
        self._token = token or self._token
        now = self._clock.monotonic()
        if is_urgent or self._saved_at is None or now - self._saved_at >= POSITION_INTERVAL_SECONDS:
            await self._positions.save(self._name, self._token)
            self._saved_at = now
