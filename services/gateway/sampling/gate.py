"""Quotas of sampling: the number of a tenant's running requests, and its token rate."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from services.gateway.quotas.enforcement import QuotaTable, TokenRates
from services.gateway.quotas.rules import Work
from services.gateway.sampling.rules import PromptResult
from services.kit.errors import QuotaExceeded
from services.kit.ids import new_id

NAME = 'concurrent_samples'
RETRY_AFTER = timedelta(seconds=1)
"""Suggested wait of a client with too many running requests."""


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
            QuotaExceeded: Too many requests are in flight, or the tenant is over its token rate.
        """
        if key in self._in_flight.get(tenant_id, ()):
            return
        self._check_count(tenant_id)
        self._rates.check(tenant_id)

    @asynccontextmanager
    async def admitted(self, tenant_id: str, *, deadline: float | None) -> AsyncIterator[None]:
        """Count a request as in flight for the duration of the block, after a wait if the tenant is over its rate.

        `deadline` is a time on the event loop's clock, or None.

        Raises:
            QuotaExceeded: Too many requests are in flight, or the wait would take too long.
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
            raise QuotaExceeded(NAME, limit, RETRY_AFTER)


def work_of(result: PromptResult) -> Work:
    """Return the usage of one prompt and its completions."""
    return Work(
        prompt_token_count=result.prompt_token_count, sampled_token_count=result.sampled_token_count, prompt_count=1
    )
