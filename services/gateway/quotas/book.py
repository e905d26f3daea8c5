"""The quotas of all tenants, in memory: whoever is held to one asks without waiting for a database."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Never

import structlog

from services.gateway.quotas.ports import QuotaStore
from services.gateway.quotas.rules import Quota, TenantQuota
from services.kit.errors import DomainError

_log = structlog.get_logger('quotas')


class QuotaBook:
    """Knows them. What is set at another gateway is known after the next reading."""

    def __init__(
        self, store: QuotaStore, *, default: Quota, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Know none yet: `read` comes first.

        Args:
            store: keeps what was set.
            default: limits of whoever has none of its own.
            pause: waits for some seconds.
        """
        self._store = store
        self._default = default
        self._pause = pause
        self._set: dict[str, Quota] = {}

    async def read(self) -> None:
        """Take what is kept as known.

        Raises:
            ServiceUnreachable: the database does not answer.
        """
        self._set = {item.tenant_id: item.quota for item in await self._store.list_all()}

    async def keep_on(self, *, interval: timedelta) -> Never:
        """Read again and again; while that fails, what was known counts."""
        while True:
            await self._pause(interval.total_seconds())
            try:
                await self.read()
            except DomainError as error:
                _log.warning('quotas not read', reason=error.reason)

    def set_for(self, tenant_id: str) -> Quota:
        """Return what was set for a tenant."""
        return self._set.get(tenant_id, Quota())

    def of(self, tenant_id: str) -> Quota:
        """Return what counts for a tenant."""
        found = self._set.get(tenant_id)
        return self._default if found is None else found.over(self._default)

    def weight_of(self, tenant_id: str) -> float:
        """Return a tenant's weight."""
        return self.of(tenant_id).weight or 1.0

    async def put(self, tenant_id: str, quota: Quota) -> None:
        """Keep a quota; it counts here from now on."""
        await self._store.put(TenantQuota(tenant_id=tenant_id, quota=quota))
        self._set[tenant_id] = quota
