"""Stores the metrics that the model services report, at short intervals.

A report is stored once, even with several gateways. The model service sends the last reports of a run again after each
change, so reports are lost only if no gateway has followed the model service for several steps of the run.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import Never

import structlog

from twinkle_services.gateway.catalogue.rules import EntryKey
from twinkle_services.gateway.errors import MetricsFull, RunDataDamaged, TenantMetricsFull
from twinkle_services.gateway.metrics.rules import PointLimits, Report, RunReports
from twinkle_services.gateway.metrics.sql import SqlMetricStore
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.telemetry import measures

MAX_WAITING = 20_000
"""Number of waiting reports, about 40 MB, at which new ones are dropped. The model service sends the last reports of a
run again with its next change."""
_INTERVAL_SECONDS = 1.0
_log = structlog.get_logger('metrics')


class MetricCollector:
    """Receives the reports of all runs from the model services' feeds, and stores them every second.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self,
        store: SqlMetricStore,
        *,
        clock: Clock,
        limits_of: Callable[[str], PointLimits],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Store reports within the limits of each tenant; `pause` sleeps for some seconds."""
        self._store = store
        self._clock = clock
        self._limits_of = limits_of
        self._pause = pause
        self._last_numbers: dict[EntryKey, int] = {}
        """Number of the last report of each run that was received."""
        self._waiting: dict[EntryKey, list[Report]] = {}
        self._waiting_count = 0
        self._refused: set[EntryKey] = set()
        """Keys of runs whose last reports were dropped, to log this once. An empty run id means the whole tenant."""

    async def save(self, entry: RunReports) -> None:
        """Keep new reports of a run for the next flush, unless too many reports wait."""
        key = entry.tenant_id, entry.run_id
        last = self._last_numbers.get(key, 0)
        new = [report for report in entry.reports if report.sequence_number > last]
        if new and self._waiting_count < MAX_WAITING:
            self._last_numbers[key] = new[-1].sequence_number
            self._waiting.setdefault(key, []).extend(new)
            self._waiting_count += len(new)

    async def mark_deleted(self, key: EntryKey, *, moment: datetime) -> None:
        """Delete the last number of a deleted run. Its waiting reports are still stored."""
        self._last_numbers.pop(key, None)
        self._refused.discard(key)

    async def mark_absent_deleted(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        """Ignore absent runs, because each of several model services reports only its own runs."""

    async def flush(self) -> None:
        """Store all waiting reports, and drop those that exceed a limit or belong to a damaged run.

        After another error, the remaining reports wait for the next flush.

        Raises:
            ServiceUnreachable: the database does not respond.
        """
        for key in list(self._waiting):
            reports, moment = self._waiting.pop(key), self._clock.now()
            is_done = False
            try:
                await self._store.save_reports(*key, reports, moment=moment, limits=self._limits_of(key[0]))
                is_done = True
                self._refused -= {key, (key[0], '')}
            except (MetricsFull, RunDataDamaged) as error:
                is_done = True
                self._record_dropped(key, len(reports), error)
            finally:
                if is_done:
                    self._waiting_count -= len(reports)
                else:
                    self._waiting[key] = reports + self._waiting.get(key, [])

    async def run_forever(self) -> Never:
        """Flush every second until cancelled."""
        while True:
            await self._pause(_INTERVAL_SECONDS)
            await self._try_flush()

    async def close(self) -> None:
        """Store the remaining reports if the database responds."""
        await self._try_flush()

    def _record_dropped(self, key: EntryKey, count: int, error: MetricsFull | RunDataDamaged) -> None:
        """Count dropped reports. The first ones of a run, or of a tenant with too many points, are logged."""
        quota = error.quota if isinstance(error, MetricsFull) else ''
        measures.dropped_reports.add(count, quota or 'damaged')
        refused = (key[0], '') if isinstance(error, TenantMetricsFull) else key
        if refused not in self._refused:
            self._refused.add(refused)
            _log.warning('metrics of steps dropped', tenant=key[0], run=key[1], reason=error.reason, quota=quota)

    async def _try_flush(self) -> None:
        try:
            await self.flush()
        except DomainError as error:
            _log.warning('metrics flush failed; retrying', reason=error.reason, waiting=self._waiting_count)
