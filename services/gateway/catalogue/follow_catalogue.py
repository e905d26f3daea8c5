"""The verb that keeps the catalogue's copy of another service's entries up to date, for ever.

A copy is made from a snapshot and then from changes. Where the stream breaks, it goes on after the
last event; where that does not work at once, a new snapshot is taken, which is right whatever was
missed. For the same reason every start of the gateway begins with one: no position is stored.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Generic, Never, TypeVar

import structlog

from services.gateway.catalogue.ports import Feed, Shelf
from services.gateway.catalogue.rules import CatalogueEvent, EntryKey, Gone, Seen, Synced
from services.kit.clock import Clock
from services.kit.errors import DomainError

Entry = TypeVar('Entry')

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0

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
        clock: Clock,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Copy `feed` to `shelf`.

        Args:
            name: names the feed in the log.
            feed: what to follow.
            shelf: where the copy is kept.
            clock: tells when entries were found gone.
            pause: waits for some seconds before another attempt.
        """
        self._name = name
        self._feed = feed
        self._shelf = shelf
        self._clock = clock
        self._pause = pause
        self._token = ''
        self._was_heard = False

    async def __call__(self) -> Never:
        """Follow the feed until cancelled."""
        failures = 0
        while True:
            self._was_heard = False
            try:
                await self._follow()
                _log.info('feed ended', feed=self._name)
            except DomainError as error:
                # An outage of an hour is one line at each end of it, not a thousand.
                write = _log.debug if failures else _log.info
                write('feed broke', feed=self._name, reason=error.reason)
            failures = 0 if self._was_heard else failures + 1
            if not self._was_heard:
                # Not heard at all: the service is away or new, and may know nothing of the token.
                self._token = ''
            limit = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(failures, 10))
            await self._pause(limit * random.uniform(0.5, 1.0))

    async def _follow(self) -> None:
        present: set[EntryKey] | None = None if self._token else set()
        async for event in self._feed.follow(self._token):
            if not self._was_heard:
                self._was_heard = True
                _log.info('feed heard', feed=self._name)
            if present is None and not event.resume_token:
                # Nothing to go on from after this event: the service began another snapshot.
                present = set()
            present = await self._copy(event, present)
            # Half a snapshot is no position to go on from.
            self._token = event.resume_token if present is None else ''

    async def _copy(self, event: CatalogueEvent[Entry], present: set[EntryKey] | None) -> set[EntryKey] | None:
        """Apply one event; return `present`, the keys of the snapshot so far, and None once it is complete."""
        match event:
            case Seen():
                await self._shelf.save(event.entry)
                if present is not None:
                    present.add(event.key)
                return present
            case Gone():
                await self._shelf.mark_gone(event.key, moment=self._clock.now())
                if present is not None:
                    present.discard(event.key)
                return present
            case Synced():
                if present is not None:
                    await self._shelf.mark_absent_gone(present, moment=self._clock.now())
                return None
