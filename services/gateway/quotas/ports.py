"""Ports of quotas: the sizes of datasets, and the lists of adapters."""

from collections.abc import Collection
from typing import Protocol


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
