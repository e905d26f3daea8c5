"""Stores the metrics that the model services report, at short intervals.

A report is stored once, even with several gateways. The model service sends the last reports of a run again after each
change, so reports are lost only if no gateway has followed it for several steps of the run.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import Never

import structlog

from services.gateway.catalogue.rules import EntryKey
from services.gateway.errors import MetricsFull, RunDataDamaged
from services.gateway.metrics.ports import MetricStore
from services.gateway.metrics.rules import Report, RunReports
from services.kit.clock import Clock
from services.kit.errors import DomainError

MAX_WAITING = 20_000
"""Number of waiting reports, about 40 MB, from which on none are received. The model service sends the last reports of
a run again with its next change."""
_INTERVAL_SECONDS = 1.0
_log = structlog.get_logger('metrics')


class MetricCollector:
    """Receives the reports of all runs from the model services' feeds, and stores them every second.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self,
        store: MetricStore,
        *,
        clock: Clock,
        max_points: int,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Store at most `max_points` points of each run; `pause` sleeps for some seconds."""
        self._store = store
        self._clock = clock
        self._max_points = max_points
        self._pause = pause
        self._last_numbers: dict[EntryKey, int] = {}
        """Number of the last report of each run that was received."""
        self._waiting: dict[EntryKey, list[Report]] = {}
        self._waiting_count = 0

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
        """Delete the last number of a deleted run. Reports that wait are still stored."""
        self._last_numbers.pop(key, None)

    async def mark_absent_deleted(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        """Ignore absent runs, because each of several model services reports only its own runs."""

    async def flush(self) -> None:
        """Store all waiting reports. After an error, the remaining reports wait for the next flush.

        Raises:
            ServiceUnreachable: the database does not respond.
        """
        for key in list(self._waiting):
            reports, moment = self._waiting.pop(key), self._clock.now()
            is_done = False
            try:
                await self._store.save_reports(*key, reports, moment=moment, max_points=self._max_points)
                is_done = True
            except (MetricsFull, RunDataDamaged) as error:
                is_done = True
                _log.debug('metrics not stored', run=key[1], reason=error.reason)
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

    async def _try_flush(self) -> None:
        try:
            await self.flush()
        except DomainError as error:
            _log.warning('metrics flush failed; retrying', reason=error.reason, waiting=self._waiting_count)
