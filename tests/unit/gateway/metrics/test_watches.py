"""Watches of metrics: the updates of each watcher, and the data that stays in memory."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import delete

from fixtures.counted_metrics import CountingMetricStore, list_runs
from twinkle_services.gateway.catalogue.runs import Runs, TenantTurns
from twinkle_services.gateway.catalogue.sql import RunRow, SqlRunStore
from twinkle_services.gateway.errors import RunDataDamaged, RunNotFound
from twinkle_services.gateway.metrics.rules import MAX_WATCHES, MetricFilter, MetricUpdate, Point, PointLimits
from twinkle_services.gateway.metrics.watches import MAX_SHARED, MetricWatches
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import Draining, QueueFull, ServiceUnreachable

ALICE = Caller(tenant_id='alice')
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = PointLimits(per_run=10**6)
Watch = AsyncGenerator[MetricUpdate, None]


@pytest.fixture
async def runs(database: Database) -> Runs:
    """Two runs of alice."""
    await list_runs(database, ('alice', 'ad-1'), ('alice', 'ad-2'))
    return Runs(SqlRunStore(database))


@pytest.fixture
async def store(database: Database) -> AsyncIterator[CountingMetricStore]:
    """Store without points."""
    store = CountingMetricStore(database)
    yield store
    store.close()


@pytest.fixture
def watches(store: CountingMetricStore, runs: Runs) -> MetricWatches:
    """Watches of the store; the test polls."""
    return MetricWatches(store, runs, turns=TenantTurns(), pause=lambda _: asyncio.sleep(0))


async def save(store: CountingMetricStore, run_id: str = 'ad-1', **steps: int) -> None:
    """Store a point with the value of its step for each metric."""
    points = [Point(name, step, float(step)) for name, step in steps.items()]
    await store.save('alice', run_id, points, moment=MOMENT, limits=LIMITS)


def watch(watches: MetricWatches, *run_ids: str, known: int | None = None, **wanted: Any) -> Watch:
    """Return a watch of runs, by default of 'ad-1'."""
    return watches.watch(ALICE, dict.fromkeys(run_ids or ('ad-1',), known), MetricFilter(**wanted))


def steps_of(update: MetricUpdate) -> dict[str, list[int]]:
    """Return the steps of an update by name."""
    return {series.name: list(series.steps) for series in update.series}


async def poll(watches: MetricWatches) -> None:
    """Poll, and wait until all changes have been read."""
    async with asyncio.TaskGroup() as reads:
        await watches.poll(reads)


async def after_poll(watches: MetricWatches, updates: Watch) -> MetricUpdate:
    """Poll until the watch has a further update, and return the update."""
    pending = asyncio.ensure_future(anext(updates))
    while not pending.done():
        await poll(watches)
        await asyncio.sleep(0)
    return await pending


async def test_watch_sends_a_snapshot_and_then_changes(store: CountingMetricStore, watches: MetricWatches) -> None:
    """The first update has all points, and each later update has the new and replaced points."""
    await save(store, loss=1)
    async with aclosing(watch(watches)) as updates:
        first = await anext(updates)
        assert (first.run_id, first.is_snapshot, steps_of(first)) == ('ad-1', True, {'loss': [1]})
        await save(store, loss=2)
        await save(store, loss=1, rate=2)
        second = await after_poll(watches, updates)
        assert (second.is_snapshot, steps_of(second)) == (False, {'loss': [1, 2], 'rate': [2]})
        await save(store, loss=3)
        third = await after_poll(watches, updates)
        assert (steps_of(third), third.revision > second.revision > first.revision) == ({'loss': [3]}, True)


async def test_several_runs_share_a_watch(store: CountingMetricStore, watches: MetricWatches) -> None:
    """Each run of a watch has a snapshot, even without metrics, and separate changes."""
    await save(store, loss=1)
    async with aclosing(watch(watches, 'ad-1', 'ad-2')) as updates:
        first = [await anext(updates), await anext(updates)]
        assert [(update.run_id, steps_of(update)) for update in first] == [('ad-1', {'loss': [1]}), ('ad-2', {})]
        await save(store, 'ad-2', loss=5)
        update = await after_poll(watches, updates)
        assert (update.run_id, update.is_snapshot, steps_of(update)) == ('ad-2', False, {'loss': [5]})


async def test_watch_resumes_without_a_snapshot(store: CountingMetricStore, watches: MetricWatches) -> None:
    """A watcher with a revision receives only later points, or immediately an empty update if nothing has changed."""
    await save(store, loss=1)
    async with aclosing(watch(watches)) as updates:
        known = (await anext(updates)).revision
    for expected in ({}, {'loss': [2]}):
        async with aclosing(watch(watches, known=known)) as updates:
            update = await anext(updates)
            assert (update.is_snapshot, steps_of(update)) == (False, expected)
        await save(store, loss=2)
    async with aclosing(watch(watches, known=update.revision + 10**9)) as updates:
        assert steps_of(await anext(updates)) == {'loss': [1, 2]}


async def test_changes_are_selected(store: CountingMetricStore, watches: MetricWatches) -> None:
    """A watcher receives only the names and steps that it selects, and no empty changes."""
    async with aclosing(watch(watches, names=['loss'], begin_step=2)) as updates:
        assert steps_of(await anext(updates)) == {}
        await save(store, loss=1, rate=5)
        pending = asyncio.ensure_future(anext(updates))
        for _ in range(5):
            await poll(watches)
            await asyncio.sleep(0)
        assert not pending.done()
        await save(store, loss=2, rate=6)
        await poll(watches)
        assert steps_of(await pending) == {'loss': [2]}


async def test_watchers_of_a_run_share_its_changes(store: CountingMetricStore, watches: MetricWatches) -> None:
    """The points of a change are read once for all watchers that read quickly, and each of them receives all points."""
    watchers = [watch(watches) for _ in range(20)]
    for updates in watchers:
        await anext(updates)
    await poll(watches)
    before = store.changes_count
    for step in range(5):
        await save(store, loss=step)
        await poll(watches)
        assert [steps_of(await anext(updates)) for updates in watchers] == [{'loss': [step]}] * 20
    assert store.changes_count == before + 5
    for updates in watchers:
        await updates.aclose()


async def test_slow_watcher_receives_the_newest_points_together(
    store: CountingMetricStore, watches: MetricWatches
) -> None:
    """A watcher that misses changes receives all of them in one update, or a snapshot if there are too many."""
    async with aclosing(watch(watches, max_points=30)) as updates:
        await anext(updates)
        for step in range(20):
            await save(store, loss=step)
            await poll(watches)
        late = await anext(updates)
        assert (late.is_snapshot, steps_of(late)) == (False, {'loss': list(range(20))})
        for step in range(20, 60):
            await save(store, loss=step)
            await poll(watches)
        late = await anext(updates)
        assert (late.is_snapshot, late.series[0].point_count) == (True, 60)
        assert len(late.series[0].steps) <= 30
        assert late.series[0].steps[-1] == 59


async def test_long_changes_are_not_kept_in_memory(store: CountingMetricStore, watches: MetricWatches) -> None:
    """Watchers read a change with many points from the store, so the gateway keeps few points in memory."""
    async with aclosing(watch(watches, max_points=10_000)) as updates:
        await anext(updates)
        await poll(watches)
        points = [Point('loss', step, 1.0) for step in range(MAX_SHARED + 1)]
        await store.save('alice', 'ad-1', points, moment=MOMENT, limits=LIMITS)
        before = store.changes_count
        update = await after_poll(watches, updates)
        assert (update.is_snapshot, len(update.series[0].steps)) == (False, MAX_SHARED + 1)
        assert store.changes_count == before + 2


async def test_unknown_run_ends_the_watch(
    database: Database, store: CountingMetricStore, watches: MetricWatches
) -> None:
    """Another tenant's run, and a run that is no longer listed, raise RunNotFound; watches of other runs continue."""
    bob = watches.watch(Caller(tenant_id='bob'), {'ad-1': None}, MetricFilter())
    with pytest.raises(RunNotFound):
        await anext(bob)
    first, both = watch(watches), watch(watches, 'ad-2', 'ad-1')
    other = watch(watches, 'ad-2')
    for updates in (first, both, both, other):
        await anext(updates)
    async with database.write() as connection:
        await connection.execute(delete(RunRow).where(RunRow.run_id == 'ad-1'))
    for updates in (first, both):
        with pytest.raises(RunNotFound, match='ad-1'):
            await after_poll(watches, updates)
    await save(store, 'ad-2', loss=1)
    assert steps_of(await after_poll(watches, other)) == {'loss': [1]}
    await other.aclose()


async def test_stopping_gateway_ends_all_watches(store: CountingMetricStore, watches: MetricWatches) -> None:
    """When the gateway begins to stop, watches fail with DRAINING, after which clients retry."""
    watchers = [watch(watches), watch(watches, 'ad-2')]
    for updates in watchers:
        await anext(updates)
    pending = [asyncio.ensure_future(anext(updates)) for updates in watchers]
    await asyncio.sleep(0)
    watches.close()
    for update in pending:
        with pytest.raises(Draining):
            await update


class SlowStore(CountingMetricStore):
    """Store whose reads wait until two tenants read. It counts the reads of each tenant at the same time."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.both_read = asyncio.Event()
        self.running: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    async def list_of(self, tenant_id: str, run_id: str, wanted: MetricFilter) -> Any:
        """Wait for a read of another tenant, and return the metrics of a run."""
        self.running[tenant_id] += 1
        self.peak |= self.running
        if len(self.peak) == 2:
            self.both_read.set()
        await self.both_read.wait()
        found = await super().list_of(tenant_id, run_id, wanted)
        self.running[tenant_id] -= 1
        return found


async def test_many_watches_of_a_tenant_read_one_after_another(database: Database, runs: Runs) -> None:
    """Only one watch of a tenant reads points at a time; watches of other tenants do not wait for this watch."""
    store = SlowStore(database)
    await list_runs(database, ('bob', 'ad-1'))
    watches = MetricWatches(store, runs, turns=TenantTurns())
    watchers = [watch(watches) for _ in range(5)]
    watchers.append(watches.watch(Caller(tenant_id='bob'), {'ad-1': None}, MetricFilter()))
    pending = [asyncio.ensure_future(anext(updates)) for updates in watchers]
    assert [update.is_snapshot for update in await asyncio.gather(*pending)] == [True] * 6
    assert store.peak == {'alice': 1, 'bob': 1}
    for updates in watchers:
        await updates.aclose()
    store.close()


async def test_tenant_with_too_many_watches_is_refused(database: Database, watches: MetricWatches) -> None:
    """A tenant has a limited number of watches; if one ends, a new one is allowed. Tenants have separate limits."""
    await list_runs(database, ('bob', 'ad-1'))
    watchers = [watch(watches) for _ in range(MAX_WATCHES)]
    for updates in watchers:
        await anext(updates)
    with pytest.raises(QueueFull):
        await anext(watch(watches))
    watchers.append(watches.watch(Caller(tenant_id='bob'), {'ad-1': None}, MetricFilter()))
    await anext(watchers[-1])
    await watchers.pop(0).aclose()
    watchers.append(watch(watches))
    await anext(watchers[-1])
    for updates in watchers:
        await updates.aclose()


class DamagedStore(CountingMetricStore):
    """Store whose changes of the run 'ad-1' cannot be read until it is repaired."""

    is_damaged = True

    async def list_changes(self, tenant_id: str, run_id: str, wanted: MetricFilter, **revisions: int) -> Any:
        """Return the points of some revisions."""
        if run_id == 'ad-1' and self.is_damaged:
            raise RunDataDamaged(run_id, 'metrics')
        return await super().list_changes(tenant_id, run_id, wanted, **revisions)


@pytest.fixture
async def damaged(database: Database) -> AsyncIterator[DamagedStore]:
    """Damaged store without points."""
    store = DamagedStore(database)
    yield store
    store.close()


async def test_damaged_run_ends_only_its_watches(damaged: DamagedStore, runs: Runs) -> None:
    """Damaged points end the watches of their run; watches of other runs continue."""
    watches = MetricWatches(damaged, runs, turns=TenantTurns())
    first, other = watch(watches), watch(watches, 'ad-2')
    for updates in (first, other):
        await anext(updates)
    await poll(watches)
    for run_id in ('ad-1', 'ad-2'):
        await save(damaged, run_id, loss=1)
    with pytest.raises(RunDataDamaged):
        await after_poll(watches, first)
    assert steps_of(await after_poll(watches, other)) == {'loss': [1]}
    await other.aclose()


async def test_repaired_run_is_watched_although_an_earlier_watcher_reads_nothing(
    damaged: DamagedStore, runs: Runs
) -> None:
    """A new watch receives the changes of a repaired run, although an earlier watcher has not read the failure."""
    watches = MetricWatches(damaged, runs, turns=TenantTurns())
    stuck = watch(watches)
    await anext(stuck)
    await poll(watches)
    await save(damaged, loss=1)
    await poll(watches)
    damaged.is_damaged = False
    updates = watch(watches)
    await anext(updates)
    await save(damaged, loss=2)
    assert steps_of(await after_poll(watches, updates)) == {'loss': [2]}
    for each in (stuck, updates):
        await each.aclose()


async def test_poll_runs_only_with_watchers_and_survives_an_outage(store: CountingMetricStore, runs: Runs) -> None:
    """The background task polls only while there are watchers, and continues after the database did not respond."""
    pauses, is_paused = asyncio.Semaphore(0), asyncio.Event()

    async def pause(seconds: float) -> None:
        assert 0 < seconds <= 1
        is_paused.set()
        await pauses.acquire()

    watches = MetricWatches(store, runs, turns=TenantTurns(), pause=pause)
    polling = asyncio.create_task(watches.run_forever())
    await asyncio.sleep(0)
    assert not is_paused.is_set()
    updates = watch(watches)
    await anext(updates)
    store.failures.append(ServiceUnreachable('database'))
    pending = asyncio.ensure_future(anext(updates))
    await save(store, loss=1)
    pauses.release()
    pauses.release()
    assert steps_of(await pending) == {'loss': [1]}
    await updates.aclose()
    is_paused.clear()
    pauses.release()
    await asyncio.sleep(0)
    assert not is_paused.is_set()
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
