"""Contract tests of the store of metrics: revisions, changes and the tenant's limit."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from fixtures.counted_metrics import list_runs
from fixtures.gateway_entries import START
from twinkle_services.gateway.errors import TenantMetricsFull
from twinkle_services.gateway.metrics.rules import MetricFilter, Point, PointLimits, Report, Series
from twinkle_services.gateway.metrics.sql import SqlEndedMetrics, SqlMetricStore
from twinkle_services.gateway.store.database import Database

RUN_1 = ('alice', 'ad-1')
UNLIMITED = PointLimits(per_run=10**6)


@dataclass(frozen=True)
class Stores:
    """Store of a gateway, and a second gateway's store on the same database."""

    first: SqlMetricStore
    second: SqlMetricStore


@pytest.fixture
async def stores(database: Database, database_url: str) -> AsyncIterator[Stores]:
    """Empty stores."""
    other = await Database.open(database_url)
    stores = Stores(SqlMetricStore(database), SqlMetricStore(other))
    yield stores
    stores.first.close()
    stores.second.close()
    await other.close()


async def save(
    store: SqlMetricStore,
    *points: Point,
    run: tuple[str, str] = RUN_1,
    seconds: float = 0,
    limits: PointLimits = UNLIMITED,
) -> None:
    """Store points `seconds` after the start."""
    await store.save(*run, points, moment=START + timedelta(seconds=seconds), limits=limits)


def points_of(series: Sequence[Series] | None) -> dict[tuple[str, int], float]:
    """Return the values of series by name and step."""
    assert series is not None
    return {(one.name, step): value for one in series for step, value in zip(one.steps, one.values, strict=True)}


async def revision_of(store: SqlMetricStore, run: tuple[str, str] = RUN_1) -> int:
    """Return the revision of a listed run."""
    return (await store.revisions_of([run]))[run]


async def changes(store: SqlMetricStore, after: int, until: int, **wanted: Any) -> dict[tuple[str, int], float]:
    """Return the points that were stored between two revisions."""
    return points_of(await store.list_changes(*RUN_1, MetricFilter(**wanted), after=after, until=until))


async def test_only_listed_runs_have_revisions(database: Database, stores: Stores) -> None:
    """A listed run without metrics has revision 0; unlisted runs and other tenants' runs are absent."""
    await list_runs(database, RUN_1, ('bob', 'ad-2'))
    await save(stores.first, Point('x', 0, 1.0), run=('alice', 'ad-3'))
    found = await stores.first.revisions_of([RUN_1, ('bob', 'ad-2'), ('alice', 'ad-2'), ('alice', 'ad-3')])
    assert found == {RUN_1: 0, ('bob', 'ad-2'): 0}
    assert await stores.first.revisions_of([]) == {}
    await save(stores.first, Point('x', 0, 1.0))
    assert (await stores.first.revisions_of([RUN_1]))[RUN_1] == int(START.timestamp() * 1_000_000)
    many = [('alice', f'ad-{number}') for number in range(1200)]
    assert (await stores.first.revisions_of(many)).keys() == {RUN_1}


async def test_each_change_is_listed_once_despite_slow_clocks(database: Database, stores: Stores) -> None:
    """Revisions of a run grow with each change, even if another gateway's clock is slow."""
    await list_runs(database, RUN_1)
    gateways = [stores.first, stores.second]
    revision, expected = 0, list[dict[tuple[str, int], float]]()
    for number, seconds in enumerate([0, 100, -50, 0, 100, 101]):
        await save(gateways[number % 2], Point('x', number, 1.0 * number), Point('y', 3, 1.0 * number), seconds=seconds)
        newest = await revision_of(gateways[1 - number % 2])
        assert newest > revision
        expected.append(await changes(gateways[number % 2], revision, newest))
        revision = newest
    assert expected == [{('x', number): float(number), ('y', 3): float(number)} for number in range(6)]
    assert await changes(stores.first, revision, revision) == {}


async def test_changes_of_random_points_reproduce_the_run(database: Database, stores: Stores) -> None:
    """A reader that applies all changes has the stored points, with divided chunks, replaced values and reports."""
    await list_runs(database, RUN_1)
    numbers, read, revision = random.Random(5), dict[tuple[str, int], float](), 0
    steps = iter(range(10**6))
    for number in range(40):
        points = [Point(numbers.choice('ab'), next(steps), numbers.random()) for _ in range(numbers.choice([1, 90]))]
        points += [Point('a', numbers.randrange(1000), numbers.random()) for _ in range(5)]
        if number % 3:
            await save(stores.first, *points, seconds=number)
        else:
            report = Report(sequence_number=number + 1, points=points)
            await stores.second.save_reports(*RUN_1, [report], moment=START, limits=UNLIMITED)
        if numbers.random() < 0.5:
            newest = await revision_of(stores.first)
            read |= await changes(stores.first, revision, newest, max_points=10_000)
            revision = newest
    newest = await revision_of(stores.first)
    read |= await changes(stores.first, revision, newest, max_points=10_000)
    everything = points_of(await stores.first.list_of(*RUN_1, MetricFilter(max_points=10_000)))
    assert read == everything
    assert await changes(stores.first, 0, newest, max_points=10_000) == everything


async def test_changes_are_selected_like_lists(database: Database, stores: Stores) -> None:
    """Changes have only selected names and steps; if a metric has too many points, the whole list is refused."""
    await list_runs(database, RUN_1)
    await save(stores.first, *(Point(name, step, 1.0) for name in 'abc' for step in range(5)))
    newest = await revision_of(stores.first)
    assert set(await changes(stores.first, 0, newest, names=['b', 'z'], begin_step=3)) == {('b', 3), ('b', 4)}
    assert await changes(stores.first, 0, newest - 1) == {}
    wanted = MetricFilter(max_points=4)
    assert await stores.first.list_changes(*RUN_1, wanted, after=0, until=newest) is None
    assert len(await changes(stores.first, 0, newest, max_points=4, begin_step=1)) == 12


async def test_tenant_has_a_limited_number_of_points(stores: Stores) -> None:
    """Points over the limit of all runs are refused as a whole; replaced points and other tenants are not affected."""
    limits = PointLimits(per_run=100, per_tenant=5)
    await save(stores.first, *(Point('x', step, 1.0) for step in range(3)), limits=limits)
    await save(stores.second, Point('x', 0, 1.0), run=('alice', 'ad-2'), limits=limits)
    with pytest.raises(TenantMetricsFull, match="'metric_points', which is 5"):
        await save(stores.first, Point('x', 0, 9.0), Point('x', 7, 9.0), Point('x', 8, 9.0), limits=limits)
    report = Report(sequence_number=1, points=[Point('y', 0, 2.0), Point('y', 1, 2.0)])
    with pytest.raises(TenantMetricsFull):
        await stores.second.save_reports('alice', 'ad-3', [report], moment=START, limits=limits)
    assert await stores.first.list_of('alice', 'ad-3', MetricFilter()) == []
    assert set(points_of(await stores.first.list_of(*RUN_1, MetricFilter())).values()) == {1.0}
    await save(stores.first, Point('x', 0, 2.0), Point('x', 3, 2.0), limits=limits)
    await save(stores.second, Point('x', 3, 3.0), limits=limits)
    with pytest.raises(TenantMetricsFull):
        await save(stores.second, Point('x', 4, 3.0), limits=limits)
    await save(stores.first, *(Point('x', step, 1.0) for step in range(5)), run=('bob', 'ad-1'), limits=limits)
    await stores.first.save_reports('alice', 'ad-3', [report], moment=START, limits=UNLIMITED)
    with pytest.raises(TenantMetricsFull):
        await save(stores.first, Point('z', 0, 1.0), limits=PointLimits(per_run=100, per_tenant=0))


async def test_limit_of_a_tenant_holds_for_runs_that_are_stored_at_the_same_time(stores: Stores) -> None:
    """Concurrent calls of two gateways for several runs store exactly as many points as the tenant may have."""
    limits = PointLimits(per_run=100, per_tenant=50)
    calls = [
        save(
            (stores.first, stores.second)[index % 2],
            *(Point('x', step, 1.0) for step in range(5)),
            run=('alice', f'ad-{index}'),
            limits=limits,
        )
        for index in range(16)
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results].count(TenantMetricsFull) == 6
    assert results.count(None) == 10


async def test_removed_runs_no_longer_count(database: Database) -> None:
    """Points of removed runs do not count, so new points can be stored."""
    store, limits = SqlMetricStore(database), PointLimits(per_run=100, per_tenant=4)
    await save(store, *(Point('x', step, 1.0) for step in range(3)), limits=limits)
    await save(store, Point('x', 0, 1.0), run=('alice', 'ad-2'), seconds=10, limits=limits)
    with pytest.raises(TenantMetricsFull):
        await save(store, Point('x', 1, 1.0), run=('alice', 'ad-2'), seconds=10, limits=limits)
    assert await SqlEndedMetrics(database).purge(before=START + timedelta(seconds=5)) == 2
    await save(store, *(Point('y', step, 1.0) for step in range(3)), run=('alice', 'ad-2'), seconds=10, limits=limits)
    with pytest.raises(TenantMetricsFull):
        await save(store, Point('z', 0, 1.0), seconds=10, limits=limits)
    store.close()
