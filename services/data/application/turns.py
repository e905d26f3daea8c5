"""Turns: one change of a tenant's datasets at a time, and a bounded number waiting."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from services.kit.errors import QueueFull


class Turns:
    """Gives each tenant one turn at a time, so that none can take every thread."""

    def __init__(self, *, queue_limit: int) -> None:
        """Let at most `queue_limit` changes of one tenant wait."""
        self._queue_limit = queue_limit
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._present: Counter[str] = Counter()

    @asynccontextmanager
    async def of(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait for the tenant's turn and hold it.

        Raises:
            QueueFull: too many wait already.
        """
        waiting = self._present[tenant_id]
        if waiting > self._queue_limit:
            raise QueueFull(waiting, self._queue_limit)
        self._present[tenant_id] += 1
        try:
            async with self._locks.setdefault(tenant_id, asyncio.Lock()):
                yield
        finally:
            self._present[tenant_id] -= 1
            self._present += Counter()  # drops the zeros
