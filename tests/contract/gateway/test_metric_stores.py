"""Contract tests of the store of metrics, on SQLite and PostgreSQL, against points in memory."""

import math
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest

from fixtures.gateway_entries import RUN, START
from services.gateway.catalogue.sql import SqlRunStore
from services.gateway.metrics.rules import MAX_STEP, MetricFilter, Point
from services.gateway.metrics.sql import SqlEndedMetrics, SqlMetricStore
from services.gateway.store.database import Database

LATER = START + timedelta(days=1)
VALUES = [0.0, -0.0, 1.5, -2.25, 1e300, 5e-324, math.inf, -math.inf, math.nan]


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """Empty database."""
    database = await Database.open(database_url)
    yield database
    await database.close()


@pytest.fixture
def store(database: Database) -> SqlMetricStore:
    """Empty store."""
    return SqlMetricStore(database)


def _points(name: str, count: int, *, seed: int = 0) -> list[Point]:
    numbers = random.Random(seed)
    return [Point(name, step, numbers.gauss()) for step in range(count)]


async def _save(store: SqlMetricStore, points: list[Point], run_id: str = 'ad-1', tenant_id: str = 'alice') -> None:
    for begin in range(0, len(points), 1000):
        await store.save(tenant_id, run_id, points[begin : begin + 1000], moment=START)


async def test_every_number_is_returned_bitwise(store):
    """Every float64 is returned with its bits, except -0.0, which is returned as 0.0; NaN stays NaN."""
    await _save(store, [Point('x', step, value) for step, value in enumerate(VALUES)])
    (series,) = await store.list_of('alice', 'ad-1', MetricFilter())
    assert [value.hex() for value in series.values] == [(value + 0.0).hex() for value in VALUES]
    assert series.steps == list(range(len(VALUES)))
    assert set(series.times) == {START}
    assert series.point_count == len(VALUES)


async def test_a_repeated_point_replaces_the_earlier_one(store):
    """A point with the name and step of another one replaces it, in the same request and in a later one."""
    await _save(store, [Point('x', 3, 1.0), Point('y', 3, 2.0), Point('x', 3, 4.0)])
    await store.save('alice', 'ad-1', [Point('y', 3, math.nan), Point('x', 2, 5.0)], moment=LATER)
    first, second = await store.list_of('alice', 'ad-1', MetricFilter())
    assert (first.name, first.steps, first.values) == ('x', [2, 3], [5.0, 4.0])
    assert first.times == [LATER, START]
    assert (second.name, second.steps) == ('y', [3])
    assert math.isnan(second.values[0])
    assert await store.count_with('alice', 'ad-1', []) == 3
    more = [Point('x', 2, 0.0), Point('x', 4, 0.0), Point('z', 2, 0.0), Point('x', 4, 1.0)]
    assert await store.count_with('alice', 'ad-1', more) == 5


async def test_metrics_belong_to_one_run_of_one_tenant(store):
    """Runs with the same id of two tenants, and two runs of a tenant, have separate metrics."""
    owners = [('alice', 'ad-1'), ('bob', 'ad-1'), ('alice', 'ad-2')]
    for number, (tenant_id, run_id) in enumerate(owners):
        await _save(store, [Point('x', 0, float(number))], run_id, tenant_id)
    for number, owner in enumerate(owners):
        (series,) = await store.list_of(*owner, MetricFilter())
        assert series.values == [float(number)]
        assert await store.count_with(*owner, []) == 1
    assert not await store.list_of('bob', 'ad-2', MetricFilter())


async def test_filters_select_names_and_steps(store):
    """A list has the requested names only, from the first step on and before the last one."""
    await _save(store, [*_points('a', 10), *_points('b', 10), *_points('c', 3)])
    found = await store.list_of('alice', 'ad-1', MetricFilter(names=['c', 'a', 'z'], begin_step=2, end_step=5))
    assert [(series.name, series.steps, series.point_count) for series in found] == [('a', [2, 3, 4], 3), ('c', [2], 1)]
    assert not await store.list_of('alice', 'ad-1', MetricFilter(begin_step=10))


@pytest.mark.parametrize('count', [10, 11, 99, 1003])
@pytest.mark.parametrize('max_points', [2, 3, 10])
async def test_long_metrics_keep_their_extremes(store, count, max_points):
    """A long metric is reduced to stored points, among them its smallest and largest value; short ones are whole."""
    long, short = _points('long', count, seed=count), _points('short', max_points)
    # Steps with gaps, the largest possible step among them.
    long = [replace(point, step=point.step * 7 if point.step < count - 1 else MAX_STEP) for point in long]
    await _save(store, [*long, *short])
    found = {one.name: one for one in await store.list_of('alice', 'ad-1', MetricFilter(max_points=max_points))}
    assert found['short'].values == [point.value for point in short]
    reduced, stored = found['long'], {point.step: point.value for point in long}
    assert reduced.point_count == count
    assert len(reduced.steps) <= max_points or count <= max_points
    assert reduced.steps == sorted(set(reduced.steps))
    assert all(stored[step] == value for step, value in zip(reduced.steps, reduced.values, strict=True))
    assert {min(stored.values()), max(stored.values())} <= set(reduced.values)


async def test_ranges_of_equal_length_keep_a_peak_each(store):
    """Each range of steps keeps its own peak, and a missing value only if it has no other."""
    values = [1.0, 9.0, 1.0, math.nan, math.nan, math.nan, math.nan, math.nan, 2.0, 2.0, 8.0, math.nan]
    await _save(store, [Point('x', step, value) for step, value in enumerate(values)])
    (series,) = await store.list_of('alice', 'ad-1', MetricFilter(max_points=6))
    assert series.steps == [0, 1, 4, 8, 10]
    assert [str(value) for value in series.values] == ['1.0', '9.0', 'nan', '2.0', '8.0']


async def test_metrics_of_runs_that_are_no_longer_listed_are_removed(database, store):
    """Old points of unknown runs are removed; new ones, and those of listed runs of the same tenant, stay."""
    await SqlRunStore(database).save(replace(RUN, tenant_id='alice', run_id='ad-1'))
    await SqlRunStore(database).save(replace(RUN, tenant_id='bob', run_id='ad-2'))
    for run_id in ('ad-1', 'ad-2'):
        await _save(store, _points('x', 700), run_id)
    await store.save('alice', 'ad-2', [Point('x', 900, 1.0)], moment=LATER)
    assert await SqlEndedMetrics(database).purge(before=LATER) == 700
    assert await store.count_with('alice', 'ad-1', []) == 700
    (left,) = await store.list_of('alice', 'ad-2', MetricFilter())
    assert left.steps == [900]
