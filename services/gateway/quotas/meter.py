"""Counts what tenants use, and writes it down every second.

Of training nothing is ever lost: runs have meters of their own at the model service, which outlive crashes, and what
is written down is how far they went. Of sampling a kill of this process loses at most what was counted in the second
before it. Nothing counts twice: a batch whose answer was lost is written again under its number.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime, timedelta
from typing import Never

import structlog

from services.gateway.catalogue.rules import EntryKey
from services.gateway.quotas.ports import UsageStore
from services.gateway.quotas.rates import TokenRates
from services.gateway.quotas.usage import Reading, UsageBatch, Work
from services.kit.clock import Clock
from services.kit.errors import DomainError
from services.kit.ids import new_id

MOST_READINGS = 500
"""Of one batch, so that no transaction is long."""
_Key = tuple[str, str]
"""Tenant and run."""

_log = structlog.get_logger('usage')


class UsageMeter:
    """Counts, for one event loop. It is the shelf that the model services' meters are copied to."""

    def __init__(
        self,
        store: UsageStore,
        rates: TokenRates,
        *,
        clock: Clock,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Write down to `store`, and have `rates` charge what is counted; `pause` waits for some seconds."""
        self._store = store
        self._rates = rates
        self._clock = clock
        self._pause = pause
        self._writer_id = new_id('uw')
        self._number = 0
        self._works: dict[_Key, Work] = {}
        self._readings: dict[_Key, Reading] = {}
        self._read: dict[_Key, Reading] = {}
        """The last reading of each run, so that what it went on is charged, and one without news is left out."""
        self._batch: UsageBatch | None = None
        """What is being written down: the same until it is."""
        self._writing = asyncio.Lock()

    def count(self, tenant_id: str, run_id: str, work: Work) -> None:
        """Count work that was done here."""
        key = tenant_id, run_id
        self._works[key] = self._works.get(key, Work()) + work
        self._rates.charge(tenant_id, work.token_count)

    async def save(self, entry: Reading) -> None:
        """Take a run's meter as read. It is charged from the second reading on: the first tells of the past."""
        key = entry.tenant_id, entry.run_id
        before = self._read.get(key)
        if before is not None and entry.trained_token_count > before.trained_token_count:
            self._rates.charge(entry.tenant_id, entry.trained_token_count - before.trained_token_count)
        if before != entry:
            self._read[key] = self._readings[key] = entry

    async def mark_gone(self, key: EntryKey, *, moment: datetime) -> None:
        """Forget a run's meter; what it went stays counted."""
        del moment
        self._read.pop(key, None)

    async def mark_absent_gone(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        """Forget nothing: of several model services each tells its own runs alone."""
        del present, moment

    async def flush(self) -> None:
        """Write down all that was counted.

        Raises:
            ServiceUnreachable: the database does not answer; it is written down the next time.
        """
        async with self._writing:
            while (batch := self._next_batch()) is not None:
                await self._store.record(batch)
                self._batch = None

    async def keep_on(self, *, interval: timedelta) -> Never:
        """Write down again and again."""
        while True:
            await self._pause(interval.total_seconds())
            await self._try_flush()

    async def close(self) -> None:
        """Write down what is left, if the database answers."""
        await self._try_flush()
        try:
            await self._store.forget_writer(self._writer_id)
        except DomainError as error:
            _log.debug('writer not forgotten', reason=error.reason)

    async def _try_flush(self) -> None:
        try:
            await self.flush()
        except DomainError as error:
            _log.warning('usage not written down yet', reason=error.reason)

    def _next_batch(self) -> UsageBatch | None:
        if self._batch is None and (self._works or self._readings):
            self._number += 1
            keys = list(self._readings)[:MOST_READINGS]
            self._batch = UsageBatch(
                writer_id=self._writer_id,
                number=self._number,
                moment=self._clock.now(),
                works=tuple((*key, work) for key, work in self._works.items()),
                readings=tuple(self._readings.pop(key) for key in keys),
            )
            self._works = {}
        return self._batch
