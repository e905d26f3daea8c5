"""Training within quotas: operations wait while tokens are owed, and saves are refused once the storage is full."""

from services.gateway.quotas.book import QuotaBook
from services.gateway.quotas.ports import UsageStore
from services.gateway.quotas.rates import TokenRates
from services.kit.errors import QuotaExceeded

STORAGE = 'stored_bytes'


class TrainingGate:
    """Says what a tenant may do now."""

    def __init__(self, book: QuotaBook, rates: TokenRates, usage: UsageStore) -> None:
        """Hold tenants to what `book` says; `rates` knows what they owe, `usage` what they store."""
        self._book = book
        self._rates = rates
        self._usage = usage

    async def enter(self, tenant_id: str, *, patience_seconds: float | None) -> None:
        """Wait for an operation to be let in; see `TokenRates.enter`."""
        await self._rates.enter(tenant_id, patience_seconds=patience_seconds)

    async def full_limit(self, tenant_id: str) -> int | None:
        """Return how many bytes a tenant may store, where it stores as many or more; None where it may go on.

        What is being saved meanwhile is not known here.
        """
        limit = self._book.of(tenant_id).stored_bytes
        if limit is None or (limit and await self._usage.stored_bytes(tenant_id) < limit):
            return None
        return limit

    async def check_storage(self, tenant_id: str) -> None:
        """Let a tenant store something.

        Raises:
            QuotaExceeded: it stores as much as it may.
        """
        limit = await self.full_limit(tenant_id)
        if limit is not None:
            raise QuotaExceeded(STORAGE, limit)

    def is_storage_limited(self, tenant_id: str) -> bool:
        """Whether there is a limit at all."""
        return self._book.of(tenant_id).stored_bytes is not None
