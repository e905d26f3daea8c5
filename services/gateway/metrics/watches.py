"""Watches of metrics, which report the points that any gateway of the deployment stores.

One task polls the revisions of all watched runs. Other tasks read the new points, once per run for all its watchers and
for at most two runs at a time, so a slow read delays no poll. Each read has a time limit. A run whose read failed or
exceeded the limit is read again apart from the others, so that it no longer delays them. Only the points of the last
change are kept. A watcher that reads slowly misses some changes, and reads all points since its last update from the
store instead.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Never

import structlog

from twinkle_services.gateway.catalogue.rules import EntryKey
from twinkle_services.gateway.catalogue.runs import Runs, TenantTurns, find_new_run
from twinkle_services.gateway.errors import RunDataDamaged, RunNotFound
from twinkle_services.gateway.metrics.rules import MAX_WATCHES, MetricFilter, MetricUpdate, Series, fits, selected_after
from twinkle_services.gateway.metrics.sql import SqlMetricStore
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError, Draining, QueueFull, ServiceUnreachable

MAX_SHARED = 2000
"""Maximum number of new points of a run that are kept for its watchers, about 200 KB."""
_INTERVAL_SECONDS = 0.5
_READS = 2
"""Maximum number of runs whose changes are read at the same time. More would only wait for the readers of the store."""
_REPEATED_READS = 1
"""Maximum number of runs whose last read did not succeed that are read at the same time."""
_READ_LIMIT = timedelta(seconds=30)
"""Time limit of a read. The largest one takes about a second."""
_log = structlog.get_logger('metrics')


@dataclass
class _WatchedRun:
    """Newest revision and last change of a run, as the poll found them."""

    watchers: set[asyncio.Event] = field(default_factory=set[asyncio.Event])
    """Set after each change."""
    revision: int | None = None
    """Newest revision; None before the first poll."""
    new_series: Sequence[Series] = ()
    """Points with revisions from `new_after` + 1 to `revision`."""
    new_after: int | None = None
    """Revision before the kept points; None if there are too many points to keep, or before the first change."""
    failure: Callable[[str], DomainError] | None = None
    """Creates the error that ends the watches of the run."""
    has_failed_read: bool = False
    """Whether the last read of changes failed or exceeded the time limit."""


@dataclass
class _Watcher:
    """The runs of a watch, and the points that the watcher has received."""

    wanted: MetricFilter
    known: dict[EntryKey, int | None]
    """Revision of each run up to which the watcher has all points; None before the first snapshot."""
    is_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after each change of a run."""
    begun: set[EntryKey] = field(default_factory=set[EntryKey])
    """Runs about which the watcher has received an update."""
    unread: list[EntryKey] = field(init=False)
    """Runs that may have points that the watcher does not have."""

    def __post_init__(self) -> None:
        self.unread = list(self.known)


class MetricWatches:
    """Sends the points of runs to watchers.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self,
        store: SqlMetricStore,
        runs: Runs,
        *,
        turns: TenantTurns,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        read_limit: timedelta = _READ_LIMIT,
    ) -> None:
        """Create watches of `runs`; `pause` sleeps for some seconds, and each read of the store has a time limit."""
        self._store = store
        self._runs = runs
        self._turns = turns
        self._pause = pause
        self._read_limit = read_limit
        self._watched: dict[EntryKey, _WatchedRun] = {}
        self._counts: Counter[str] = Counter()
        """Number of watches by tenant."""
        self._has_watchers = asyncio.Event()
        self._reads, self._repeated_reads = asyncio.Semaphore(_READS), asyncio.Semaphore(_REPEATED_READS)
        self._unfinished = set[EntryKey]()
        """Runs whose changes a task reads, or waits to read."""
        self._is_closing = False

    async def watch(
        self, caller: Caller, known: Mapping[str, int | None], wanted: MetricFilter
    ) -> AsyncGenerator[MetricUpdate, None]:
        """Yield an update of each run, and then one after each change, until the gateway begins to stop.

        `known` contains the runs to watch, each with the revision up to which the watcher has all points, or None.

        Raises:
            QueueFull: the tenant has too many watches.
            RunNotFound: the caller has no such run, or the run is no longer listed.
            RunDataDamaged: the stored points of a run cannot be read.
            ServiceUnreachable: the database does not respond, or not within the time limit.
            Draining: the gateway begins to stop.
        """
        for run_id in known:
            await find_new_run(self._runs, caller, run_id, pause=self._pause)
        watcher = _Watcher(wanted, {(caller.tenant_id, run_id): revision for run_id, revision in known.items()})
        with self._counted(caller.tenant_id), self._watching(watcher):
            while True:
                # No variable refers to the points while a slow client reads them.
                yield await self._next(watcher)

    async def _next(self, watcher: _Watcher) -> MetricUpdate:
        """Wait for the next update of a watcher."""
        while True:
            while watcher.unread:
                key = watcher.unread.pop(0)
                is_first, update = key not in watcher.begun, await self._unread(watcher, key)
                if update is None:
                    continue
                watcher.known[key] = update.revision
                watcher.begun.add(key)
                if is_first or update.series or update.is_snapshot:
                    return update
            await watcher.is_changed.wait()
            watcher.is_changed.clear()
            watcher.unread = list(watcher.known)

    def close(self) -> None:
        """End all watches."""
        self._is_closing = True
        for run in self._watched.values():
            _wake(run)

    async def run_forever(self) -> Never:
        """Poll at short intervals while there are watchers, until cancelled."""
        async with asyncio.TaskGroup() as reads:
            while True:
                await self._has_watchers.wait()
                await self._pause(_INTERVAL_SECONDS)
                try:
                    await self.poll(reads)
                except DomainError as error:
                    _log.warning('poll of metrics failed; retrying', reason=error.reason)

    async def poll(self, reads: asyncio.TaskGroup) -> None:
        """Start to read the changes of watched runs in `reads`. Runs whose earlier changes are being read are skipped.

        Raises:
            ServiceUnreachable: the database does not respond, or not within the time limit.
        """
        watched = {key: run for key, run in self._watched.items() if key not in self._unfinished}
        async with self._limited():
            revisions = await self._store.revisions_of(watched)
        for key, run in watched.items():
            if _has_changes(run, revisions.get(key)):
                self._unfinished.add(key)
                reads.create_task(self._read_changes(key, run, revisions[key]))

    async def _read_changes(self, key: EntryKey, run: _WatchedRun, revision: int) -> None:
        """Read the points up to the newest revision of a run, and wake its watchers, unless they have all ended."""
        try:
            async with self._repeated_reads if run.has_failed_read else self._reads:
                if not run.watchers:
                    return
                # An earlier failure remains while a watcher reads nothing; new watchers must not receive it.
                run.failure, run.has_failed_read = None, True
                wanted = MetricFilter(max_points=MAX_SHARED)
                try:
                    async with self._limited():
                        found = await self._store.list_changes(*key, wanted, after=run.revision or 0, until=revision)
                except RunDataDamaged:
                    found, run.failure = None, partial(RunDataDamaged, kind='metrics')
            is_short = found is not None and sum(len(series.steps) for series in found) <= MAX_SHARED
            run.new_series, run.new_after = (found or (), run.revision) if is_short else ((), None)
            run.revision, run.has_failed_read = revision, False
            _wake(run)
        except DomainError as error:
            _log.warning('changes of metrics not read; retrying', tenant=key[0], run=key[1], reason=error.reason)
        finally:
            self._unfinished.remove(key)

    async def _unread(self, watcher: _Watcher, key: EntryKey) -> MetricUpdate | None:
        """Return the first update of a run, or the points that the watcher does not have; None without such points."""
        if self._is_closing:
            raise Draining()
        known = watcher.known[key]
        if key not in watcher.begun or known is None:
            return await self._first(key, known, watcher.wanted)
        return await self._later(key, known, watcher.wanted)

    async def _first(self, key: EntryKey, known: int | None, wanted: MetricFilter) -> MetricUpdate:
        async with self._turn(key):
            newest = (await self._store.revisions_of([key])).get(key)
            if newest is None:
                raise RunNotFound(key[1])
            if known is None or known > newest:
                return await self._snapshot(key, wanted, newest)
            return await self._changes(key, wanted, after=known, until=newest)

    async def _later(self, key: EntryKey, known: int, wanted: MetricFilter) -> MetricUpdate | None:
        run = self._watched[key]
        if run.failure is not None:
            raise run.failure(key[1])
        if run.revision is None or run.revision <= known:
            return None
        if run.new_after is None or run.new_after > known:
            async with self._turn(key):
                return await self._changes(key, wanted, after=known, until=run.revision)
        series = selected_after(run.new_series, wanted, revision=known)
        if not fits(series, wanted):
            async with self._turn(key):
                return await self._snapshot(key, wanted, run.revision)
        return MetricUpdate(run_id=key[1], series=series, is_snapshot=False, revision=run.revision)

    async def _changes(self, key: EntryKey, wanted: MetricFilter, *, after: int, until: int) -> MetricUpdate:
        series = await self._store.list_changes(*key, wanted, after=after, until=until)
        if series is None:
            return await self._snapshot(key, wanted, until)
        return MetricUpdate(run_id=key[1], series=series, is_snapshot=False, revision=until)

    async def _snapshot(self, key: EntryKey, wanted: MetricFilter, revision: int) -> MetricUpdate:
        # The list may have points that are newer than the revision. They are sent again with the next change.
        series = await self._store.list_of(*key, wanted)
        return MetricUpdate(run_id=key[1], series=series, is_snapshot=True, revision=revision)

    @asynccontextmanager
    async def _turn(self, key: EntryKey) -> AsyncIterator[None]:
        """Wait until the tenant of a run may read its points, and limit the time of the block."""
        async with self._turns.of(key[0]):
            if self._is_closing:
                raise Draining()
            async with self._limited():
                yield

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Cancel the block and raise ServiceUnreachable after the time limit of a read."""
        try:
            async with asyncio.timeout(self._read_limit.total_seconds()):
                yield
        except TimeoutError as error:
            _log.warning('read of metrics exceeded its time limit', limit_seconds=self._read_limit.total_seconds())
            raise ServiceUnreachable('database') from error

    @contextmanager
    def _counted(self, tenant_id: str) -> Iterator[None]:
        """Count a watch of a tenant during the block, or raise QueueFull."""
        count = self._counts[tenant_id]
        if count >= MAX_WATCHES:
            raise QueueFull(queue_length=count, queue_limit=MAX_WATCHES)
        self._counts[tenant_id] += 1
        try:
            yield
        finally:
            self._counts[tenant_id] -= 1
            self._counts += Counter()  # removes counts of zero

    @contextmanager
    def _watching(self, watcher: _Watcher) -> Iterator[None]:
        """Poll the runs of a watcher during the block."""
        for key in watcher.known:
            self._watched.setdefault(key, _WatchedRun()).watchers.add(watcher.is_changed)
        self._has_watchers.set()
        try:
            yield
        finally:
            for key in watcher.known:
                run = self._watched[key]
                run.watchers.discard(watcher.is_changed)
                if not run.watchers:
                    del self._watched[key]
            if not self._watched:
                self._has_watchers.clear()


def _has_changes(run: _WatchedRun, revision: int | None) -> bool:
    """Return whether the changes up to a revision must be read. Without a revision, the watches of the run end."""
    if revision is None:
        run.failure = RunNotFound
    elif run.revision is None:
        run.revision = revision
    else:
        return revision > run.revision
    _wake(run)
    return False


def _wake(run: _WatchedRun) -> None:
    for is_changed in run.watchers:
        is_changed.set()
