"""Quotas and usage: what keeps them, and what they are checked against."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

from services.gateway.quotas.rules import TenantQuota
from services.gateway.quotas.usage import Usage, UsageBatch


class QuotaStore(Protocol):
    """Keeps what was set for tenants."""

    async def list_all(self) -> Sequence[TenantQuota]:
        """Return all."""
        ...

    async def put(self, quota: TenantQuota) -> None:
        """Keep a quota in the place of the tenant's last one."""
        ...


class UsageStore(Protocol):
    """Keeps what tenants used."""

    async def record(self, batch: UsageBatch) -> None:
        """Put a batch down, wholly and once, however often it comes; those of a writer come in order.

        Of a reading counts what is beyond the furthest one of the run, whoever brought that.
        """
        ...

    async def forget_writer(self, writer_id: str) -> None:
        """Forget who counted: no more comes from there."""
        ...

    async def list_of(self, tenant_id: str, *, begin: datetime | None, end: datetime | None) -> Sequence[Usage]:
        """Return what was used in the hours that begin at `begin` or later and before `end`, by run."""
        ...

    async def stored_bytes(self, tenant_id: str) -> int:
        """Return the bytes of the tenant's checkpoints."""
        ...


class AdapterCensus(Protocol):
    """Knows which adapters there are."""

    async def adapter_ids(self, tenant_id: str) -> Collection[str]:
        """Return a tenant's adapters, of all base models, as they are now.

        Raises:
            DomainError: a service's own error, or ServiceUnreachable.
        """
        ...
