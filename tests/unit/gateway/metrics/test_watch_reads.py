"""Reads for watches of metrics: two at the same time, and reads that fail, never end, are cancelled or are skipped."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from fixtures.counted_metrics import CountingMetricStore, list_runs
from fixtures.fake_samplers import until
from twinkle_services.gateway.catalogue.rules import EntryKey
from twinkle_services.gateway.catalogue.runs import Runs, TenantTurns
from twinkle_services.gateway.catalogue.sql import SqlRunStore
from twinkle_services.gateway.metrics.rules import MetricFilter, MetricUpdate, Point, PointLimits
from twinkle_services.gateway.metrics.watches import MetricWatches
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import ServiceUnreachable

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = PointLimits(per_run=10**6)
READ_LIMIT = timedelta(milliseconds=250)
"""Time limit of reads. Reads that do not wait for the test are much faster."""
THREE_TENANTS = [('alice', 'ad-1'), ('bob', 'ad-1'), ('carol', 'ad-1')]
Watch = AsyncGenerator[MetricUpdate, None]


class WaitingStore(CountingMetricStore):
    """Store whose reads of changes of runs 'ad-1' wait for the test, and then fail if the test says so."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.continued, self.arrived = asyncio.Event(), asyncio.Event()
        self.is_failing = False
        self.running = self.most_running = 0

    async def list_changes(self, tenant_id: str, run_id: str, wanted: MetricFilter, **revisions: int) -> Any:
        """Return the points of some revisions."""
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.arrived.set()
        try:
            await asyncio.sleep(0)
            if run_id == 'ad-1':
                await self.continued.wait()
                if self.is_failing:
                    raise ServiceUnreachable('database')
            return await super().list_changes(tenant_id, run_id, wanted, **revisions)
        finally:
            self.running -= 1


@pytest.fixture
async def store(database: Database) -> AsyncIterator[WaitingStore]:
    """Store without points."""
    store = WaitingStore(database)
    yield store
    store.close()


@pytest.fixture
def watches(database: Database, store: WaitingStore) -> MetricWatches:
    """Watches of the store."""
    return watches_of(database, store)


def watches_of(database: Database, store: WaitingStore, **options: Any) -> MetricWatches:
    """Return watches of a store."""
    runs = Runs(SqlRunStore(database))
    return MetricWatches(store, runs, turns=TenantTurns(), pause=lambda _: asyncio.sleep(0), **options)


def watch(watches: MetricWatches, run: EntryKey) -> Watch:
    """Return a watch of a run."""
    return watches.watch(Caller(tenant_id=run[0]), {run[1]: None}, MetricFilter())


async def poll(watches: MetricWatches) -> None:
    """Poll, and wait until all changes have been read."""
    async with asyncio.TaskGroup() as reads:
        await watches.poll(reads)


async def begun(watches: MetricWatches, runs: list[EntryKey]) -> list[Watch]:
    """Return a watch of each run, whose later updates are changes."""
    watchers = [watch(watches, run) for run in runs]
    for updates in watchers:
        await anext(updates)
    await poll(watches)
    return watchers


async def waiting_poll(watches: MetricWatches, store: WaitingStore) -> asyncio.Task[None]:
    """Change the runs of three tenants, and return a running poll with two running reads."""
    for run in THREE_TENANTS:
        await save(store, run, 1)
    polling = asyncio.create_task(poll(watches))
    while store.running < 2:
        store.arrived.clear()
        await store.arrived.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert store.running == 2
    return polling


async def save(store: WaitingStore, run: EntryKey, step: int) -> None:
    """Store a point of the metric 'loss'."""
    await store.save(*run, [Point('loss', step, float(step))], moment=MOMENT, limits=LIMITS)


def steps_of(update: MetricUpdate) -> list[int]:
    """Return the steps of the metric 'loss'."""
    return [step for series in update.series for step in series.steps]


async def test_slow_or_failing_read_of_a_run_delays_no_other_run(
    database: Database, store: WaitingStore, watches: MetricWatches
) -> None:
    """Two runs are read at the same time. While a read waits, and after it failed, polls find changes of all runs."""
    runs = [('alice', f'ad-{number}') for number in range(1, 6)]
    await list_runs(database, *runs)
    store.is_failing = True
    watchers = await begun(watches, runs)
    polling = asyncio.create_task(watches.run_forever())
    for step in (1, 2):
        for run in runs:
            await save(store, run, step)
        assert [steps_of(await anext(updates)) for updates in watchers[1:]] == [[step]] * 4
        assert (store.running, store.most_running) == (1, 2)
    store.continued.set()
    await save(store, runs[1], 3)
    assert steps_of(await anext(watchers[1])) == [3]
    store.is_failing = False
    assert steps_of(await anext(watchers[0])) == [1, 2]
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    for updates in watchers:
        await updates.aclose()


async def test_reads_that_never_end_delay_other_runs_once(database: Database, store: WaitingStore) -> None:
    """The reads are logged and end at the time limit. They are then repeated one at a time, apart from other runs."""
    runs = [*THREE_TENANTS, ('alice', 'ad-2')]
    await list_runs(database, *runs)
    watches = watches_of(database, store, read_limit=READ_LIMIT)
    watchers = await begun(watches, runs)
    with capture_logs() as logs:
        polling = asyncio.create_task(watches.run_forever())
        for run in runs:
            await save(store, run, 1)
        assert steps_of(await asyncio.wait_for(anext(watchers[3]), 60)) == [1]
        await until(lambda: {(log['tenant'], log['run']) for log in logs if 'run' in log} == set(THREE_TENANTS))
        store.most_running, count = 0, len(logs)
        await until(lambda: len(logs) >= count + 6)
        assert store.most_running == 1
        await save(store, runs[3], 2)
        assert steps_of(await asyncio.wait_for(anext(watchers[3]), 60)) == [2]
    assert {log['event'] for log in logs} == {
        'read of metrics exceeded its time limit',
        'changes of metrics not read; retrying',
    }
    store.continued.set()
    assert [steps_of(await asyncio.wait_for(anext(updates), 60)) for updates in watchers[:3]] == [[1]] * 3
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    for updates in watchers:
        await updates.aclose()


async def test_first_read_and_poll_end_at_the_time_limit(database: Database, store: WaitingStore) -> None:
    """A watch whose first read never ends fails and can be repeated, and a poll that never ends fails."""
    await list_runs(database, *THREE_TENANTS)
    watches = watches_of(database, store, read_limit=READ_LIMIT)
    updates = watches.watch(Caller(tenant_id='alice'), {'ad-1': 0}, MetricFilter())
    with pytest.raises(ServiceUnreachable):
        await asyncio.wait_for(anext(updates), 60)
    hanging: Any = store
    hanging.revisions_of = lambda _: asyncio.Event().wait()
    async with asyncio.TaskGroup() as reads:
        with pytest.raises(ServiceUnreachable):
            await asyncio.wait_for(watches.poll(reads), 60)


async def test_cancelled_reads_are_repeated(database: Database, store: WaitingStore, watches: MetricWatches) -> None:
    """The next poll repeats all cancelled reads, including one that waited for its turn."""
    await list_runs(database, *THREE_TENANTS)
    watchers = await begun(watches, THREE_TENANTS)
    polling = await waiting_poll(watches, store)
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    store.continued.set()
    assert store.changes_count == 0
    await poll(watches)
    assert store.changes_count == 3
    assert [steps_of(await anext(updates)) for updates in watchers] == [[1]] * 3
    for updates in watchers:
        await updates.aclose()


async def test_changes_of_a_run_without_watchers_are_not_read(
    database: Database, store: WaitingStore, watches: MetricWatches
) -> None:
    """A read that waits for its turn is skipped if the last watch of its run has ended; new watches receive changes."""
    await list_runs(database, *THREE_TENANTS)
    watchers = await begun(watches, THREE_TENANTS)
    polling = await waiting_poll(watches, store)
    for updates in watchers:
        await updates.aclose()
    store.continued.set()
    await polling
    assert store.changes_count == 2
    watchers = await begun(watches, THREE_TENANTS)
    for run in THREE_TENANTS:
        await save(store, run, 2)
    await poll(watches)
    assert store.changes_count == 5
    assert [steps_of(await anext(updates)) for updates in watchers] == [[2]] * 3
    for updates in watchers:
        await updates.aclose()
