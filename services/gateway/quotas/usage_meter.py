"""Counts the usage of tenants, and records it at intervals, by default every second.

Training usage is never lost: each run has a durable meter at the model service, and its readings are recorded here.
Sampling usage since the last record is lost if this process is killed. No usage is counted twice: a batch whose
response was lost is sent again under the same number, and the store records each number once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime, timedelta
from typing import Never

import structlog

from twinkle_services.gateway.catalogue.rules import EntryKey
from twinkle_services.gateway.quotas.enforcement import TokenRates
from twinkle_services.gateway.quotas.rules import Reading, UsageBatch, Work
from twinkle_services.gateway.quotas.sql import SqlUsageStore
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.ids import new_id

MAX_READINGS = 500
"""Maximum number of readings in one batch, which keeps transactions short."""

_log = structlog.get_logger('usage')


class UsageMeter:
    """Counts usage, and receives the meters of runs from the model services' feeds.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self,
        store: SqlUsageStore,
        rates: TokenRates,
        *,
        clock: Clock,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._rates = rates
        self._clock = clock
        self._pause = pause
        self._writer_id = new_id('uw')
        self._number = 0
        self._works: dict[EntryKey, Work] = {}
        self._readings: dict[EntryKey, Reading] = {}
        self._last_readings: dict[EntryKey, Reading] = {}
        """Last reading of each run. The increase over it is charged, and an equal reading is not recorded again."""
        self._batch: UsageBatch | None = None
        """Batch that is being recorded; it stays the same until it succeeds."""
        self._writing = asyncio.Lock()

    def count(self, tenant_id: str, run_id: str, work: Work) -> None:
        """Count work that this gateway has done, and charge its tokens to the tenant's rate."""
        key = tenant_id, run_id
        self._works[key] = self._works.get(key, Work()) + work
        self._rates.charge(tenant_id, work.token_count)

    async def save(self, entry: Reading) -> None:
        """Keep a run's reading for the next flush, and charge its increase over the last reading, if there is one."""
        key = entry.tenant_id, entry.run_id
        before = self._last_readings.get(key)
        if before is not None and entry.trained_token_count > before.trained_token_count:
            self._rates.charge(entry.tenant_id, entry.trained_token_count - before.trained_token_count)
        if before != entry:
            self._last_readings[key] = self._readings[key] = entry

    async def mark_deleted(self, key: EntryKey, *, moment: datetime) -> None:
        """Drop the last reading of a deleted run; its usage stays recorded."""
        self._last_readings.pop(key, None)

    async def mark_absent_deleted(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        """Ignore absent runs, because each of several model services reports only its own runs."""

    async def flush(self) -> None:
        """Record all counted work.

        Raises:
            ServiceUnreachable: the database does not respond; the next flush records the same batch.
        """
        async with self._writing:
            while (batch := self._next_batch()) is not None:
                await self._store.record(batch)
                self._batch = None

    async def run_forever(self, *, interval: timedelta) -> Never:
        """Flush every `interval` until cancelled."""
        while True:
            await self._pause(interval.total_seconds())
            await self._try_flush()

    async def close(self) -> None:
        """Record the remaining usage if the database responds."""
        await self._try_flush()
        try:
            await self._store.forget_writer(self._writer_id)
        except DomainError as error:
            _log.debug('usage writer not deleted', reason=error.reason)

    async def _try_flush(self) -> None:
        try:
            await self.flush()
        except DomainError as error:
            _log.warning('usage flush failed; retrying', reason=error.reason)

    def _next_batch(self) -> UsageBatch | None:
        if self._batch is None and (self._works or self._readings):
            self._number += 1
            keys = list(self._readings)[:MAX_READINGS]
            self._batch = UsageBatch(
                writer_id=self._writer_id,
                number=self._number,
                moment=self._clock.now(),
                works=tuple((*key, work) for key, work in self._works.items()),
                readings=tuple(self._readings.pop(key) for key in keys),
            )
            self._works = {}
        return self._batch
