"""How many adapters a tenant may have: one too many is refused before it is made."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from services.gateway.application.quotas.book import QuotaBook
from services.gateway.ports import AdapterCensus
from services.kit.errors import QuotaExceeded

NAME = 'max_adapters'
_REMEMBERED = 4096


class NewAdapters:
    """Lets adapters be made, one of a tenant's after the other where it has a quota.

    Two gateways that make one for a tenant at the same moment do not know of each other's.
    """

    def __init__(self, book: QuotaBook, census: AdapterCensus) -> None:
        """Hold tenants to what `book` says; `census` tells what they have."""
        self._book = book
        self._census = census
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._made: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Requests that went well: sent again, they make nothing new."""

    @asynccontextmanager
    async def creating(self, tenant_id: str, *, request_id: str, adapter_id: str) -> AsyncIterator[None]:
        """Let an adapter be made in the block.

        Args:
            tenant_id: whose it will be.
            request_id: a repeat has the same; empty where there is none.
            adapter_id: as chosen by the client; empty where it chose none. One that is there is no new one.

        Raises:
            QuotaExceeded: the tenant has as many as it may.
            DomainError: it cannot be told how many there are.
        """
        limit = self._book.of(tenant_id).max_adapters
        if limit is None:
            yield
            return
        turn = self._turns.setdefault(tenant_id, asyncio.Lock())
        async with turn:
            if not request_id or (tenant_id, request_id) not in self._made:
                there = await self._census.adapter_ids(tenant_id)
                if len(there) >= limit and adapter_id not in there:
                    raise QuotaExceeded(NAME, limit)
            yield
            if request_id:
                self._made[tenant_id, request_id] = None
            if len(self._made) > _REMEMBERED:
                self._made.popitem(last=False)
