"""How many adapters a tenant may have. What is beyond it the model service refuses, which knows what is a repeat."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from services.gateway.quotas.book import QuotaBook
from services.gateway.quotas.ports import AdapterCensus


class NewAdapters:
    """Lets adapters be made, one of a tenant's after the other where it has a quota.

    Two gateways that make one for a tenant at the same moment do not know of each other's.
    """

    def __init__(self, book: QuotaBook, census: AdapterCensus) -> None:
        """Hold tenants to what `book` says; `census` tells what they have."""
        self._book = book
        self._census = census
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def creating(self, tenant_id: str) -> AsyncIterator[int | None]:
        """Let an adapter be made in the block.

        What was made before, and is asked for again since its answer was lost, is no new one. Only the model service
        knows that: it is asked in any case, and told of the limit.

        Args:
            tenant_id: whose it will be.

        Yields:
            The limit, where the tenant has as many as it may: what is new is to be refused. None: it may have it.

        Raises:
            DomainError: it cannot be told how many there are.
        """
        limit = self._book.of(tenant_id).max_adapters
        if limit is None:
            yield None
            return
        turn = self._turns.setdefault(tenant_id, asyncio.Lock())
        async with turn:
            is_full = len(await self._census.adapter_ids(tenant_id)) >= limit
            yield limit if is_full else None
