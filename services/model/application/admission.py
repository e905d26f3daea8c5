"""How many operations a tenant may have under way: overload is refused, or waits if the caller prefers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.kit.errors import QueueFull


class Admission:
    """Counts each tenant's operations. For one event loop."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` operations of one tenant at a time."""
        self._limit = limit
        self._counts: Counter[str] = Counter()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def place(self, tenant_id: str, *, is_waiting_allowed: bool) -> AsyncIterator[None]:
        """Hold a place while the block runs.

        Raises:
            QueueFull: there is none, and waiting is not allowed.
        """
        while self._counts[tenant_id] >= self._limit:
            if not is_waiting_allowed:
                raise QueueFull(queue_length=self._counts[tenant_id], queue_limit=self._limit)
            await self._changed.wait()
        self._counts[tenant_id] += 1
        try:
            yield
        finally:
            self._counts[tenant_id] -= 1
            if not self._counts[tenant_id]:
                del self._counts[tenant_id]
            self._changed.set()
            self._changed = asyncio.Event()
