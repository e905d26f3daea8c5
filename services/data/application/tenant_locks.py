"""Locks that serialize the changes of each tenant, or its long reads."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from twinkle_services.kit.errors import QueueFull


class TenantLocks:
    """Runs one call of each tenant at a time, so that no tenant can occupy all threads.

    Concurrency: waiting calls of a tenant run in the order in which they arrived.
    """

    def __init__(self, *, queue_limit: int) -> None:
        """Allow at most `queue_limit` calls of a tenant to wait."""
        self._queue_limit = queue_limit
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._change_counts: Counter[str] = Counter()
        """Number of running and waiting calls by tenant."""

    @asynccontextmanager
    async def hold(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait for the tenant's lock, and hold it during the block.

        Raises:
            QueueFull: Too many calls of the tenant are waiting.
        """
        count = self._change_counts[tenant_id]
        if count > self._queue_limit:
            raise QueueFull(count, self._queue_limit)
        self._change_counts[tenant_id] += 1
        try:
            async with self._locks.setdefault(tenant_id, asyncio.Lock()):
                yield
        finally:
            self._change_counts[tenant_id] -= 1
            self._change_counts += Counter()  # removes counts of zero
