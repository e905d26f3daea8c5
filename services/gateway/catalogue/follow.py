"""Keeps the catalogue's copy of another service's entries up to date.

The copy starts with a snapshot, followed by changes. A stream that breaks after the snapshot resumes after its last
event. If that fails, the next attempt requests a new snapshot. Resume tokens are not stored, so every start of the
gateway requests a snapshot. `Purge` removes rows that ended long ago.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Never, TypeVar

import grpc
import structlog

from twinkle_services.gateway.catalogue.grpc import adapter_feed, checkpoint_feed, listed_checkpoint_of
from twinkle_services.gateway.catalogue.ports import EndedRows, EntryStore, Feed
from twinkle_services.gateway.catalogue.rules import (
    CatalogueEvent,
    EntryChanged,
    EntryDamaged,
    EntryDeleted,
    EntryKey,
    SnapshotComplete,
)
from twinkle_services.gateway.catalogue.sql import SqlCheckpointStore
from twinkle_services.gateway.sessions.sweep import Job
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError

Entry = TypeVar('Entry')
Copy = tuple[Callable[[Any], Entry], EntryStore[Entry]]
"""Function that converts an entry of a feed, and the store of the converted entries."""

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
KEPT_FOR = timedelta(days=30)
"""Minimum time for which deleted entries and other ended rows stay stored."""
_PURGE_INTERVAL = timedelta(days=1)

_log = structlog.get_logger('catalogue')


class Purge:
    """Removes rows that ended more than `KEPT_FOR` ago. Several gateways may purge the same database."""

    def __init__(self, stores: Sequence[EndedRows], *, clock: Clock) -> None:
        """Create a purge of `stores` in this order; a store keeps rows that belong to a row of an earlier store."""
        self._stores = stores
        self._clock = clock

    async def run(self, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Never:
        """Remove old rows now and once a day until cancelled. The next purge completes a failed one."""
        while True:
            try:
                if count := sum([await store.purge(before=self._clock.now() - KEPT_FOR) for store in self._stores]):
                    _log.info('old rows removed', count=count)
            except DomainError as error:
                _log.warning('purge failed', reason=error.reason)
            await pause(_PURGE_INTERVAL.total_seconds())


class FeedFollower:
    """Copies the entries of a feed to stores.

    If a store fails, the event is applied again, including to the stores before the failed one.

    Concurrency: one task calls `run`; several gateways may copy the same feed to one database.
    """

    def __init__(
        self,
        name: str,
        *,
        feed: Feed,
        copies: Sequence[Copy[Any]],
        clock: Clock,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create a follower of `feed`; log lines contain `name`, and `pause` sleeps for a number of seconds."""
        self._name = name
        self._feed = feed
        self._copies = copies
        self._clock = clock
        self._pause = pause
        self._token = ''
        self._is_connected = False

    async def run(self) -> Never:
        """Follow the feed until cancelled."""
        failures = 0
        while True:
            self._is_connected = False
            try:
                await self._follow()
                _log.info('feed ended', feed=self._name)
            except DomainError as error:
                # A failure that follows an attempt without any event is logged at the debug level only.
                write = _log.debug if failures else _log.info
                write('feed failed', feed=self._name, reason=error.reason)
            failures = 0 if self._is_connected else failures + 1
            if not self._is_connected:
                # The service sent no event, so it may have refused the token.
                self._token = ''
            limit = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(failures, 10))
            await self._pause(limit * random.uniform(0.5, 1.0))

    async def _follow(self) -> None:
        present: set[EntryKey] | None = None if self._token else set()
        async for event in self._feed(self._token):
            if not self._is_connected:
                self._is_connected = True
                _log.info('feed connected', feed=self._name)
            if present is None and not event.resume_token:
                # An event without a token belongs to a new snapshot that the service began.
                present = set()
            present = await self._copy(event, present)
            # An incomplete snapshot cannot be resumed.
            self._token = event.resume_token if present is None else ''

    async def _copy(self, event: CatalogueEvent[Any], present: set[EntryKey] | None) -> set[EntryKey] | None:
        """Apply one event; return the keys of the incomplete snapshot, or None after it is complete."""
        match event:
            case EntryChanged():
                for convert, store in self._copies:
                    await store.save(convert(event.entry))
            case EntryDeleted():
                for _, store in self._copies:
                    await store.mark_deleted(event.key, moment=self._clock.now())
                if present is not None:
                    present.discard(event.key)
                return present
            case EntryDamaged():
                pass
            case SnapshotComplete():
                if present is not None:
                    for _, store in self._copies:
                        await store.mark_absent_deleted(present, moment=self._clock.now())
                return None
        if present is not None:
            present.add(event.key)
        return present


def adapter_jobs(
    title: str,
    models: Mapping[str, grpc.aio.Channel],
    copies_of: Callable[[str], Sequence[Copy[Any]]],
    *,
    clock: Clock,
    is_reports_only: bool = False,
) -> list[Job]:
    """Return the jobs that copy the adapters of each model service, or only their metric reports.

    `title` is for logs, `models` contains an internal channel to each service by name, and `copies_of` returns the
    copies that are made from the feed of a service. `is_reports_only` is described at `adapter_feed`.
    """
    feeds = {name: adapter_feed(channel, is_reports_only=is_reports_only) for name, channel in models.items()}
    return [
        FeedFollower(f'{title} of {name}', feed=feed, copies=copies_of(name), clock=clock).run
        for name, feed in feeds.items()
    ]


def checkpoint_jobs(database: Database, channel: grpc.aio.Channel | None, *, clock: Clock) -> list[Job]:
    """Return a list with the job that copies checkpoints to the catalogue, or an empty list without a `channel`."""
    if channel is None:
        return []
    copies = [(listed_checkpoint_of, SqlCheckpointStore(database))]
    return [FeedFollower('checkpoints', feed=checkpoint_feed(channel), copies=copies, clock=clock).run]
