"""Contract tests of the store of metrics, on SQLite and PostgreSQL."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from fixtures.gateway_entries import RUN, START
from twinkle_services.gateway.catalogue.sql import SqlRunStore
from twinkle_services.gateway.errors import MetricsFull, RunDataDamaged
from twinkle_services.gateway.metrics.rules import (
    MAX_LISTED,
    MAX_NAMES,
    MAX_STEP,
    MetricFilter,
    Point,
    PointLimits,
    Report,
)
from twinkle_services.gateway.metrics.sql import MetricChunkRow, SqlEndedMetrics, SqlMetricStore
from twinkle_services.gateway.store.database import Database

LATER = START + timedelta(days=1)
VALUES = [0.0, -0.0, 1.5, -2.25, 1e300, 5e-324, math.inf, -math.inf, math.nan]


@pytest.fixture
async def store(database: Database) -> AsyncIterator[SqlMetricStore]:
    """Empty store."""
    store = SqlMetricStore(database)
    yield store
    store.close()


async def _save(
    store: SqlMetricStore,
    points: list[Point],
    owner: tuple[str, str] = ('alice', 'ad-1'),
    *,
    moment: datetime = START,
    max_points: int = 10**6,
    tenant_points: int | None = None,
) -> None:
    limits = PointLimits(per_run=max_points, per_tenant=tenant_points)
    for begin in range(0, len(points), 1000):
        await store.save(*owner, points[begin : begin + 1000], moment=moment, limits=limits)


async def _metrics(store: SqlMetricStore, owner: tuple[str, str] = ('alice', 'ad-1'), **wanted: Any) -> dict[str, Any]:
    return {series.name: series for series in await store.list_of(*owner, MetricFilter(**wanted))}


def _texts(values: Any) -> list[str]:
    return [float(value).hex() for value in values]


async def test_every_number_is_returned_bitwise(store):
    """Every float64 is returned bitwise, and NaN as NaN, with the time at which it was stored."""
    await _save(store, [Point('x', step, value) for step, value in enumerate(VALUES)])
    (series,) = (await _metrics(store)).values()
    assert _texts(series.values) == _texts(VALUES)
    assert series.steps == list(range(len(VALUES)))
    assert set(series.times_us) == {int(START.timestamp() * 1_000_000)}
    assert series.point_count == len(VALUES)


async def test_random_points_are_stored_like_a_mapping(store):
    """Points in any order, across chunk borders and in several calls, are stored like the values of a mapping."""
    numbers = random.Random(3)
    expected: dict[tuple[str, int], float] = {}
    steps = [0, 1, 1022, 1023, 1024, 1025, 5000, 2**40, MAX_STEP - 1, MAX_STEP]
    for _ in range(30):
        count = numbers.randint(1, 40)
        points = [Point(numbers.choice('abc'), numbers.choice(steps), numbers.choice(VALUES)) for _ in range(count)]
        await _save(store, points)
        expected.update({(point.name, point.step): point.value for point in points})
    found = await _metrics(store)
    for name, series in found.items():
        own = sorted(step for key, step in expected if key == name)
        assert series.steps == own
        assert _texts(series.values) == _texts(expected[name, step] for step in own)
    assert sum(series.point_count for series in found.values()) == len(expected)
    part = await _metrics(store, names=['b', 'z'], begin_step=1023, end_step=5001)
    assert list(part) == ['b']
    assert part['b'].steps == sorted(step for key, step in expected if key == 'b' and 1023 <= step < 5001)


async def test_metrics_belong_to_one_run_of_one_tenant(store):
    """Runs with the same id of two tenants, and two runs of a tenant, have separate metrics."""
    owners = [('alice', 'ad-1'), ('bob', 'ad-1'), ('alice', 'ad-2')]
    for number, owner in enumerate(owners):
        await _save(store, [Point('x', 0, float(number))], owner)
    for number, owner in enumerate(owners):
        assert (await _metrics(store, owner))['x'].values == [float(number)]
    assert await _metrics(store, ('bob', 'ad-2')) == {}


@pytest.mark.parametrize('count', [11, 99, 1003])
@pytest.mark.parametrize('max_points', [2, 3, 10])
async def test_long_metrics_keep_their_ends_and_extremes(store, count, max_points):
    """A long metric is reduced to stored points: both ends and, if ten points are allowed, the extremes."""
    numbers = random.Random(count)
    # The steps have gaps, and the last step is the largest possible step.
    steps = [*(7 * step for step in range(count - 1)), MAX_STEP]
    stored = {step: numbers.gauss() for step in steps}
    await _save(store, [Point('long', step, value) for step, value in stored.items()])
    await _save(store, [Point('short', step, float(step)) for step in range(max_points)])
    found = await _metrics(store, max_points=max_points)
    assert found['short'].steps == list(range(max_points))
    reduced = found['long']
    assert (reduced.point_count, reduced.steps[0], reduced.steps[-1]) == (count, 0, MAX_STEP)
    assert len(reduced.steps) <= max_points
    assert reduced.steps == sorted(set(reduced.steps))
    assert all(stored[step] == value for step, value in zip(reduced.steps, reduced.values, strict=True))
    if max_points == 10:
        inner = [value for step, value in stored.items() if step not in (0, MAX_STEP)]
        assert {min(inner), max(inner)} <= set(reduced.values)


async def test_ranges_of_equal_length_keep_a_peak_each(store):
    """Each range of steps keeps its own peak, and keeps NaN only if the range has no other value."""
    values = [1.0, 9.0, 1.0, math.nan, math.nan, math.nan, math.nan, math.nan, 2.0, 2.0, 8.0, math.nan]
    await _save(store, [Point('x', step, value) for step, value in enumerate(values)])
    series = (await _metrics(store, max_points=8))['x']
    assert series.steps == [0, 1, 4, 8, 10, 11]
    assert [str(value) for value in series.values] == ['1.0', '9.0', 'nan', '2.0', '8.0', 'nan']


async def test_lists_of_many_metrics_are_bounded(store):
    """A list of many metrics has at most a fixed number of points, so each metric has fewer."""
    for index in range(MAX_NAMES):
        await _save(store, [Point(f'm{index:03}', step, 1.0) for step in range(150)])
    found = await _metrics(store, max_points=10_000)
    assert len(found) == MAX_NAMES
    assert sum(len(series.steps) for series in found.values()) <= MAX_LISTED
    assert {series.point_count for series in found.values()} == {150}


async def test_limits_hold_for_gateways_that_store_at_the_same_time(database, database_url):
    """Concurrent calls of two gateways store exactly a run's maximum number of points; replaced points do not count."""
    other = await Database.open(database_url)
    stores = [SqlMetricStore(database), SqlMetricStore(other)]
    calls = [
        _save(stores[index % 2], [Point('x', 5 * index + step, 1.0) for step in range(5)], max_points=50)
        for index in range(24)
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results].count(MetricsFull) == 14
    assert (await _metrics(stores[0]))['x'].point_count == 50
    kept = (await _metrics(stores[0]))['x'].steps[0]
    await _save(stores[1], [Point('x', kept, 2.0)], max_points=50)
    with pytest.raises(MetricsFull, match='metric_points_per_run'):
        await _save(stores[1], [Point('x', kept, 3.0), Point('y', 0, 3.0)], max_points=50)
    assert list(await _metrics(stores[0])) == ['x']
    assert (await _metrics(stores[0]))['x'].values[0] == 2.0
    await other.close()


async def test_names_of_a_run_are_limited(store):
    """A run has at most 1,000 metrics; other runs and known names are not affected."""
    await _save(store, [Point(f'm{index}', 0, 1.0) for index in range(MAX_NAMES)])
    with pytest.raises(MetricsFull, match='metric_names_per_run'):
        await _save(store, [Point('m0', 1, 1.0), Point('more', 0, 1.0)])
    await _save(store, [Point('m0', 1, 1.0)])
    await _save(store, [Point('more', 0, 1.0)], ('alice', 'ad-2'))


async def test_metrics_of_runs_that_are_no_longer_listed_are_removed(database):
    """Old metrics of unknown runs are removed; metrics of listed runs, and newer metrics, are kept."""
    store = SqlMetricStore(database)
    await SqlRunStore(database).save(replace(RUN, tenant_id='alice', run_id='ad-1'))
    await SqlRunStore(database).save(replace(RUN, tenant_id='bob', run_id='ad-2'))
    points = [Point(f'm{index}', 0, 1.0) for index in range(700)]
    for run_id in ('ad-1', 'ad-2', 'ad-3'):
        await _save(store, points, ('alice', run_id))
    await _save(store, points, ('alice', 'ad-3'), moment=LATER)
    assert await SqlEndedMetrics(database).purge(before=LATER) == 701
    assert await SqlEndedMetrics(database).purge(before=LATER) == 0
    assert len(await _metrics(store, ('alice', 'ad-1'))) == len(await _metrics(store, ('alice', 'ad-3'))) == 700
    assert await _metrics(store, ('alice', 'ad-2')) == {}


def _report(number: int, *points: Point) -> Report:
    return Report(sequence_number=number, points=points)


async def test_each_report_is_stored_once(store):
    """Reports up to the last stored number are ignored, even with other values; logged values are kept."""
    save = store.save_reports
    await _save(store, [Point('own', 1, 7.0)])
    first, second = _report(2, Point('loss', 1, 3.0)), _report(4, Point('loss', 2, 2.0), Point('rate', 2, 0.1))
    for reports in ([first], [first, second], [_report(4, Point('loss', 2, 9.0))], []):
        await save('alice', 'ad-1', reports, moment=START, limits=PointLimits(per_run=100))
    found = await _metrics(store)
    assert {name: (series.steps, series.values) for name, series in found.items()} == {
        'loss': ([1, 2], [3.0, 2.0]),
        'own': ([1], [7.0]),
        'rate': ([2], [0.1]),
    }
    # After an undo, the same step is reported again with a higher number.
    await save('alice', 'ad-1', [_report(9, Point('loss', 2, 1.5))], moment=START, limits=PointLimits(per_run=100))
    assert (await _metrics(store))['loss'].values == [3.0, 1.5]


async def test_gateways_store_the_reports_of_a_run_once(database, database_url):
    """Two gateways that receive the same reports store each point once, in the order of the numbers."""
    other = await Database.open(database_url)
    stores = [SqlMetricStore(database), SqlMetricStore(other)]
    reports = [_report(number, Point('loss', number % 7, float(number))) for number in range(1, 40)]
    calls = [
        stores[index % 2].save_reports(
            'alice', 'ad-1', reports[index : index + 8], moment=START, limits=PointLimits(per_run=100)
        )
        for index in range(32)
    ]
    await asyncio.gather(*calls)
    series = (await _metrics(stores[0]))['loss']
    assert series.point_count == 7
    assert series.values[39 % 7] == 39.0
    await other.close()


async def test_reports_count_against_the_limit_of_a_run(store):
    """Reports beyond the limit raise MetricsFull and are not stored; the reports before them are kept."""
    reports = [_report(number, Point('loss', number, 1.0)) for number in range(1, 6)]
    await store.save_reports('alice', 'ad-1', reports[:3], moment=START, limits=PointLimits(per_run=4))
    with pytest.raises(MetricsFull):
        await store.save_reports('alice', 'ad-1', reports[3:], moment=START, limits=PointLimits(per_run=4))
    assert (await _metrics(store))['loss'].steps == [1, 2, 3]
    await store.save_reports('alice', 'ad-1', reports[3:4], moment=START, limits=PointLimits(per_run=4))
    assert (await _metrics(store))['loss'].steps == [1, 2, 3, 4]


async def test_damaged_points_affect_only_their_run(database):
    """Damaged points are an error of their run only, for lists, changes, logged values and reports."""
    store = SqlMetricStore(database)
    await _save(store, [Point('x', 1, 1.0)])
    async with database.write() as connection:
        await connection.execute(update(MetricChunkRow).values(points=b'damaged'))
    report = Report(sequence_number=2, points=[Point('x', 2, 1.0)])
    for call in (
        lambda: _metrics(store),
        lambda: store.list_changes('alice', 'ad-1', MetricFilter(), after=0, until=2**60),
        lambda: _save(store, [Point('x', 2, 1.0)]),
        lambda: store.save_reports('alice', 'ad-1', [report], moment=START, limits=PointLimits(per_run=9)),
    ):
        with pytest.raises(RunDataDamaged) as caught:
            await call()
        assert dict(caught.value.metadata()) == {'id': 'ad-1', 'kind': 'metrics'}
    other = 'alice', 'ad-2'
    await store.save_reports(*other, [report], moment=START, limits=PointLimits(per_run=9))
    assert (await _metrics(store, other))['x'].steps == [2]


@pytest.mark.parametrize('count', [MAX_NAMES + 1, 70_000])
async def test_reports_with_too_many_names_are_refused(store, count):
    """A report with more names than a run may have is refused, even with more names than a statement has parameters."""
    report = Report(sequence_number=2, points=[Point(f'x{index}', 2, 1.0) for index in range(count)])
    with pytest.raises(MetricsFull, match='metric_names_per_run'):
        await store.save_reports('alice', 'ad-1', [report], moment=START, limits=PointLimits(per_run=10**6))
    assert await _metrics(store) == {}
