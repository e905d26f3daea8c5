"""Training within quotas: operations wait while tokens are owed, and saves are refused once the storage is full."""

from services.gateway.futures.trainer_ports import Trainer
from services.gateway.quotas.book import QuotaBook
from services.gateway.quotas.new_adapters import NewAdapters
from services.gateway.quotas.ports import UsageStore
from services.gateway.quotas.rates import TokenRates
from services.gateway.quotas.requests import QuotaRequests
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


class LimitedTrainer:
    """Implements `ports.Trainer` for futures, whose clients are told that they wait, and not refused."""

    def __init__(
        self, trainer: Trainer, gate: TrainingGate, new_adapters: NewAdapters, *, requests: QuotaRequests
    ) -> None:
        """Hold calls of `trainer` to quotas.

        Args:
            trainer: makes them.
            gate: lets operations in.
            new_adapters: lets adapters be made.
            requests: reads and marks what is passed on.
        """
        self._trainer = trainer
        self._gate = gate
        self._new_adapters = new_adapters
        self._requests = requests

    async def create_adapter(self, tenant_id: str, request: bytes, *, request_id: str) -> bytes:
        """Create an adapter, and return the answer; one that was made for the request before is always found.

        Raises:
            QuotaExceeded: it is new, and the tenant has as many as it may.
        """
        async with self._new_adapters.creating(tenant_id) as limit:
            request = request if limit is None else self._requests.refused_creation(request, limit)
            return await self._trainer.create_adapter(tenant_id, request, request_id=request_id)

    async def delete_adapter(self, tenant_id: str, request: bytes) -> bytes:
        """Delete an adapter, and return the answer."""
        return await self._trainer.delete_adapter(tenant_id, request)

    async def last_number(self, tenant_id: str, adapter_id: str) -> int:
        """Return the number of an adapter's last operation."""
        return await self._trainer.last_number(tenant_id, adapter_id)

    async def execute(self, tenant_id: str, request: bytes, *, number: int) -> bytes:
        """Run an operation once the tenant owes no tokens, and return the answer.

        Raises:
            QuotaExceeded: it saves, and the tenant stores as much as it may.
        """
        await self._gate.enter(tenant_id, patience_seconds=None)
        if self._gate.is_storage_limited(tenant_id) and self._requests.is_save(request):
            limit = await self._gate.full_limit(tenant_id)
            request = request if limit is None else self._requests.refused_save(request, limit)
        return await self._trainer.execute(tenant_id, request, number=number)

    async def cancel(self, tenant_id: str, adapter_id: str, *, number: int) -> None:
        """Drop an operation that still waits there."""
        await self._trainer.cancel(tenant_id, adapter_id, number=number)
