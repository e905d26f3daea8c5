"""Enforcement of quotas: the quotas in memory, token rates, and the limits of sampling and of training."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Never
from weakref import WeakValueDictionary

import structlog

from twinkle_services.gateway.quotas.ports import AdapterLister, DatasetSizes
from twinkle_services.gateway.quotas.rules import Quota, TokenBucket
from twinkle_services.gateway.quotas.sql import SqlQuotaStore, SqlUsageStore
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError, QuotaExceeded
from twinkle_services.kit.ids import new_id

TOKENS = 'tokens_per_second'
STORAGE = 'stored_bytes'
SAMPLES = 'concurrent_samples'
_SAMPLES_RETRY = timedelta(seconds=1)
"""Suggested wait of a client with too many running requests."""
_SHORTEST_SECONDS = 0.01
_LONGEST_SECONDS = 1.0
"""Minimum and maximum wait between two checks of a rate. The maximum exists because the quota may change."""

_log = structlog.get_logger('quotas')


class QuotaTable:
    """Quotas of all tenants in memory. Changes made through another gateway appear after the next `read()`.

    `default` contains the limits that a tenant's quota does not set, and `pause` sleeps for a number of seconds.
    """

    def __init__(
        self, store: SqlQuotaStore, *, default: Quota, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._store = store
        self._default = default
        self._pause = pause
        self._quotas: dict[str, Quota] = {}

    async def read(self) -> None:
        """Reload all quotas from the store.

        Raises:
            ServiceUnreachable: the database does not respond.
        """
        self._quotas = dict(await self._store.list_all())

    async def run_forever(self, *, interval: timedelta) -> Never:
        """Reload all quotas every `interval`. If that fails, the previous quotas stay in effect."""
        while True:
            await self._pause(interval.total_seconds())
            try:
                await self.read()
            except DomainError as error:
                _log.warning('quota reload failed', reason=error.reason)

    def set_for(self, tenant_id: str) -> Quota:
        """Return the quota that was set for a tenant, without defaults."""
        return self._quotas.get(tenant_id, Quota())

    def of(self, tenant_id: str) -> Quota:
        """Return the limits in effect for a tenant."""
        found = self._quotas.get(tenant_id)
        return self._default if found is None else found.over(self._default)

    def weight_of(self, tenant_id: str) -> float:
        """Return a tenant's weight in fair queues."""
        return self.of(tenant_id).weight or 1.0

    async def put(self, tenant_id: str, quota: Quota) -> None:
        """Store a quota; this gateway applies it immediately."""
        await self._store.put(tenant_id, quota)
        self._quotas[tenant_id] = quota


class TokenRates:
    """Token buckets of all tenants with a rate. They count only tokens that this gateway charged since its start."""

    def __init__(
        self, quotas: QuotaTable, *, clock: Clock, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._quotas = quotas
        self._clock = clock
        self._pause = pause
        self._buckets: dict[str, TokenBucket] = {}

    def charge(self, tenant_id: str, count: int) -> None:
        """Charge used tokens to a tenant, unless the tenant has no rate."""
        if (bucket := self._bucket(tenant_id)) is not None:
            bucket.charge(count, now=self._clock.monotonic())

    def seconds_until_free(self, tenant_id: str) -> float:
        """Return the time until a tenant is within its rate; 0.0 if it is."""
        bucket = self._bucket(tenant_id)
        return 0.0 if bucket is None else bucket.seconds_until_free(now=self._clock.monotonic())

    def is_over_rate(self, tenant_id: str) -> bool:
        """Return whether a tenant has used more tokens than its rate and burst allow."""
        return self.seconds_until_free(tenant_id) > 0

    def check(self, tenant_id: str) -> None:
        """Refuse a tenant that is over its rate.

        Raises:
            QuotaExceeded: the tenant is over its rate; the error contains the time until it is within its rate.
        """
        if (seconds := self.seconds_until_free(tenant_id)) > 0:
            limit = self._quotas.of(tenant_id).tokens_per_second or 0
            raise QuotaExceeded(TOKENS, limit, timedelta(seconds=seconds))

    async def enter(self, tenant_id: str, *, patience_seconds: float | None) -> None:
        """Wait until a tenant is within its rate, for at most `patience_seconds`; None means no limit.

        Raises:
            QuotaExceeded: the wait would exceed `patience_seconds`; raised as soon as this is certain.
        """
        give_up_at = None if patience_seconds is None else self._clock.monotonic() + patience_seconds
        while (seconds := self.seconds_until_free(tenant_id)) > 0:
            if give_up_at is not None and self._clock.monotonic() + seconds > give_up_at:
                self.check(tenant_id)
            await self._pause(min(max(seconds, _SHORTEST_SECONDS), _LONGEST_SECONDS))

    def _bucket(self, tenant_id: str) -> TokenBucket | None:
        quota = self._quotas.of(tenant_id)
        if quota.tokens_per_second is None:
            self._buckets.pop(tenant_id, None)
            return None
        rate, now = float(quota.tokens_per_second), self._clock.monotonic()
        bucket = self._buckets.get(tenant_id)
        if bucket is None:
            bucket = self._buckets[tenant_id] = TokenBucket(rate=rate, burst=quota.burst, now=now)
        else:
            bucket.change(rate=rate, burst=quota.burst, now=now)
        return bucket


class SamplingGate:
    """Admits sampling requests, and counts those in flight by tenant. Futures and direct calls count together.

    A direct call waits up to `patience` until its tenant is within its token rate.

    Concurrency: use it from one event loop.
    """

    def __init__(self, table: QuotaTable, rates: TokenRates, *, patience: timedelta) -> None:
        self._table = table
        self._rates = rates
        self._patience_seconds = patience.total_seconds()
        self._in_flight: dict[str, Counter[str]] = {}

    def count(self, tenant_id: str) -> int:
        return len(self._in_flight.get(tenant_id, ()))

    def enter(self, tenant_id: str, key: str) -> None:
        """Count a request once; it is in flight until `leave` has been called as often as `enter`."""
        self._in_flight.setdefault(tenant_id, Counter())[key] += 1

    def leave(self, tenant_id: str, key: str) -> None:
        """Undo one `enter`; an unknown request is ignored."""
        requests = self._in_flight.get(tenant_id)
        if requests is None or key not in requests:
            return
        requests[key] -= 1
        if not requests[key]:
            del requests[key]
        if not requests:
            del self._in_flight[tenant_id]

    def check(self, tenant_id: str, key: str) -> None:
        """Check that a request may be accepted to run later; a request in flight always passes.

        Raises:
            QuotaExceeded: too many requests are in flight, or the tenant is over its token rate.
        """
        if key in self._in_flight.get(tenant_id, ()):
            return
        self._check_count(tenant_id)
        self._rates.check(tenant_id)

    @asynccontextmanager
    async def admitted(self, tenant_id: str, *, deadline: float | None) -> AsyncIterator[None]:
        """Count a request as in flight, wait until the tenant is within its rate, and run the block.

        `deadline` is a time on the event loop's clock, or None.

        Raises:
            QuotaExceeded: too many requests are in flight, or the wait would exceed `patience` or the deadline.
        """
        key, patience = new_id('sp'), self._patience_seconds
        self._check_count(tenant_id)
        self.enter(tenant_id, key)
        try:
            if deadline is not None:
                patience = min(patience, max(0.0, deadline - asyncio.get_running_loop().time()))
            await self._rates.enter(tenant_id, patience_seconds=patience)
            yield
        finally:
            self.leave(tenant_id, key)

    def _check_count(self, tenant_id: str) -> None:
        limit = self._table.of(tenant_id).concurrent_samples
        if limit is not None and self.count(tenant_id) >= limit:
            raise QuotaExceeded(SAMPLES, limit, _SAMPLES_RETRY)


class TrainingLimits:
    """Limits of training: the rate of tokens, the storage, and the number of adapters.

    Two gateways that create an adapter for the same tenant at the same moment may exceed `max_adapters` by one.
    """

    def __init__(
        self,
        quotas: QuotaTable,
        rates: TokenRates,
        usage: SqlUsageStore,
        adapters: AdapterLister,
        datasets: DatasetSizes,
    ) -> None:
        self.rates = rates
        self._quotas = quotas
        self._datasets = datasets
        self._usage = usage
        self._adapters = adapters
        self._creation_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def full_limit(self, tenant_id: str) -> int | None:
        """Return a tenant's storage limit in bytes if it is reached, else None. Saves in progress are not counted.

        If the data service fails, only the tenant's checkpoints count, so that training can save its work.
        """
        limit = self._quotas.of(tenant_id).stored_bytes
        if not limit:
            return limit
        stored_bytes = await self._usage.stored_bytes(tenant_id)
        if stored_bytes < limit:
            stored_bytes += await self.dataset_bytes(tenant_id)
        return limit if stored_bytes >= limit else None

    async def dataset_bytes(self, tenant_id: str) -> int:
        """Return the total bytes of a tenant's datasets and uploads; 0 if the data service is not deployed or fails."""
        try:
            return await self._datasets.stored_bytes(tenant_id)
        except DomainError as error:
            _log.warning('datasets not counted in stored bytes', tenant=tenant_id, reason=error.reason)
            return 0

    async def check_storage(self, tenant_id: str) -> None:
        """Refuse a tenant whose storage is full.

        Raises:
            QuotaExceeded: the tenant's checkpoints, datasets and uploads reach its limit.
        """
        if (limit := await self.full_limit(tenant_id)) is not None:
            raise QuotaExceeded(STORAGE, limit)

    def is_storage_limited(self, tenant_id: str) -> bool:
        """Return whether the tenant has a storage limit."""
        return self._quotas.of(tenant_id).stored_bytes is not None

    @asynccontextmanager
    async def creating(self, tenant_id: str) -> AsyncIterator[int | None]:
        """Serialize the creation of a tenant's adapters while the block runs, if the tenant has a limit.

        Only the model service recognizes a repeated request, which creates no adapter. The service is therefore called
        even if the limit is reached, and refuses a new adapter if the request contains the limit.

        Yields:
            The limit if it is reached, else None.

        Raises:
            DomainError: the number of adapters is unknown, because a model service refused or is unreachable.
        """
        limit = self._quotas.of(tenant_id).max_adapters
        if limit is None:
            yield None
            return
        async with self._creation_locks.setdefault(tenant_id, asyncio.Lock()):
            is_full = len(await self._adapters.adapter_ids(tenant_id)) >= limit
            yield limit if is_full else None
