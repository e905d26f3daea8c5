"""The collector stores the model services' reports once, and keeps them while the database does not respond."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from structlog.testing import capture_logs

from fixtures.recorded_metrics import metric
from twinkle_services.gateway.errors import MetricsFull, RunDataDamaged, TenantMetricsFull
from twinkle_services.gateway.metrics.collector import MAX_WAITING, MetricCollector
from twinkle_services.gateway.metrics.rules import Point, PointLimits, Report, RunReports
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import ServiceUnreachable

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = PointLimits(per_run=100)


class Recorder:
    """Records the numbers of reports instead of storing them; it first raises the errors in `failures`."""

    def __init__(self) -> None:
        self.saved: dict[tuple[str, str], list[int]] = {}
        self.failures: list[BaseException] = []
        self.call_count = 0

    async def save_reports(self, tenant_id: str, run_id: str, reports: Sequence[Report], **options: Any) -> None:
        del options
        self.call_count += 1
        if self.failures:
            raise self.failures.pop(0)
        self.saved.setdefault((tenant_id, run_id), []).extend(report.sequence_number for report in reports)


def reports(*numbers: int, run_id: str = 'ad-1') -> RunReports:
    """Return a run's reports with these numbers."""
    found = [Report(sequence_number=number, points=[Point('train/loss', number, 1.0)]) for number in numbers]
    return RunReports(tenant_id='alice', run_id=run_id, reports=found)


@pytest.fixture
def store() -> Recorder:
    """Empty store."""
    return Recorder()


@pytest.fixture
def collector(store: Recorder) -> MetricCollector:
    """Collector of the store."""
    recording: Any = store
    return MetricCollector(recording, clock=FakeClock(), limits_of=lambda _: LIMITS, pause=lambda _: asyncio.sleep(0))


async def test_repeated_reports_are_stored_once(store: Recorder, collector: MetricCollector) -> None:
    """The feed repeats the last reports with each change; each report is stored once, in one call per run."""
    for numbers in ([], [2], [2], [2, 4], [4, 6]):
        await collector.save(reports(*numbers))
    await collector.save(reports(3, run_id='ad-2'))
    await collector.flush()
    await collector.flush()
    assert store.saved == {('alice', 'ad-1'): [2, 4, 6], ('alice', 'ad-2'): [3]}
    assert store.call_count == 2


async def test_reports_wait_while_the_database_does_not_respond(store: Recorder, collector: MetricCollector) -> None:
    """A failed flush and a cancelled flush lose no report and keep the order."""
    await collector.save(reports(2))
    await collector.save(reports(3, run_id='ad-2'))
    for error in (ServiceUnreachable('database'), asyncio.CancelledError()):
        store.failures.append(error)
        with pytest.raises(type(error)):
            await collector.flush()
    await collector.save(reports(2, 4))
    await collector.close()
    assert store.saved == {('alice', 'ad-1'): [2, 4], ('alice', 'ad-2'): [3]}


@pytest.mark.parametrize(
    'error',
    [
        MetricsFull('metric_points_per_run', 100),
        TenantMetricsFull('metric_points', 100),
        RunDataDamaged('ad-1', 'metrics'),
    ],
)
async def test_unusable_run_does_not_stop_the_others(
    store: Recorder, collector: MetricCollector, error: Exception
) -> None:
    """The reports of a run that is full or damaged are dropped, and the reports of other runs are stored."""
    store.failures.append(error)
    await collector.save(reports(2))
    await collector.save(reports(3, run_id='ad-2'))
    await collector.flush()
    assert store.saved == {('alice', 'ad-2'): [3]}
    assert store.call_count == 2


async def test_deleted_run_is_dropped_after_its_last_report(store: Recorder, collector: MetricCollector) -> None:
    """Reports that wait when a run is deleted are stored; afterwards, a report of the run may have any number."""
    await collector.save(reports(2))
    await collector.mark_deleted(('alice', 'ad-1'), moment=MOMENT)
    await collector.mark_absent_deleted([], moment=MOMENT)
    await collector.flush()
    assert store.saved == {('alice', 'ad-1'): [2]}
    await collector.save(reports(1))
    await collector.flush()
    assert store.saved == {('alice', 'ad-1'): [2, 1]}


async def test_waiting_reports_are_limited(store: Recorder, collector: MetricCollector) -> None:
    """A limited number of reports wait during a long database failure; afterwards, reports are received again."""
    for number in range(1, MAX_WAITING + 10):
        await collector.save(reports(number))
    store.failures.append(ServiceUnreachable('database'))
    with pytest.raises(ServiceUnreachable):
        await collector.flush()
    await collector.save(reports(MAX_WAITING + 10))
    await collector.flush()
    assert store.saved[('alice', 'ad-1')] == list(range(1, MAX_WAITING + 1))
    last = range(MAX_WAITING + 3, MAX_WAITING + 11)
    await collector.save(reports(*last))
    await collector.flush()
    assert store.saved[('alice', 'ad-1')][-9:] == [MAX_WAITING, *last]


async def test_dropped_reports_are_counted_and_logged_once(store: Recorder, collector: MetricCollector) -> None:
    """A tenant over its limit causes one log line for all its runs, until one of its reports is stored again."""
    before = metric('twinkle_metric_reports_dropped_total', cause='metric_points')
    lines: list[list[str]] = []
    for number in range(1, 5):
        store.failures += [TenantMetricsFull('metric_points', 100)] * 2 if number != 3 else []
        await collector.save(reports(number))
        await collector.save(reports(number, run_id='ad-2'))
        with capture_logs() as logs:
            await collector.flush()
        lines.append([f'{line["tenant"]} {line["quota"]}' for line in logs if line['log_level'] == 'warning'])
    assert lines == [['alice metric_points'], [], [], ['alice metric_points']]
    assert metric('twinkle_metric_reports_dropped_total', cause='metric_points') == before + 6
    assert store.saved == {('alice', 'ad-1'): [3], ('alice', 'ad-2'): [3]}
