"""Ports of quotas: stores of quotas and usage, the sizes of datasets, and the lists of adapters."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from twinkle_services.gateway.quotas.rules import Quota, Usage, UsageBatch


class QuotaStore(Protocol):
    """Stores the quotas that administrators set."""

    async def list_all(self) -> Mapping[str, Quota]:
        """Return the quotas of all tenants by id."""
        ...

    async def put(self, tenant_id: str, quota: Quota) -> None:
        """Store a quota, replacing the tenant's previous one."""
        ...


class UsageStore(Protocol):
    """Stores the usage of tenants."""

    async def record(self, batch: UsageBatch) -> None:
        """Record a batch completely and exactly once; the batches of one writer arrive in order.

        A reading counts as its increase over the run's highest earlier reading, from any writer.
        """
        ...

    async def forget_writer(self, writer_id: str) -> None:
        """Delete a writer's batch number once it will send no more batches."""
        ...

    async def list_of(self, tenant_id: str, *, begin: datetime | None, end: datetime | None) -> Sequence[Usage]:
        """Return the usage by run in the hours that start at or after `begin` and before `end`; None is no bound."""
        ...

    async def stored_bytes(self, tenant_id: str) -> int:
        """Return the total size in bytes of the tenant's checkpoints."""
        ...


class DatasetSizes(Protocol):
    """Measures the data that the data service stores for a tenant."""

    async def stored_bytes(self, tenant_id: str) -> int:
        """Return the total size in bytes of the tenant's datasets and uploads.

        Raises:
            DomainError: the data service refused, or is unreachable.
        """
        ...


class AdapterLister(Protocol):
    """Lists the adapters that exist at the model services."""

    async def adapter_ids(self, tenant_id: str) -> Collection[str]:
        """Return the ids of a tenant's current adapters, of all base models.

        Raises:
            DomainError: a model service refused, or is unreachable.
        """
        ...
