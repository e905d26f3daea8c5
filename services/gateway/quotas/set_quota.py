"""The verb that changes what a tenant may use."""

from services.gateway.errors import TenantNotFound
from services.gateway.keys.ports import TenantStore
from services.gateway.quotas.book import QuotaBook
from services.gateway.quotas.rules import Quota


class SetQuota:
    """Sets quotas; what is under way goes on."""

    def __init__(self, tenants: TenantStore, book: QuotaBook) -> None:
        """Keep them in `book`."""
        self._tenants = tenants
        self._book = book

    async def __call__(self, tenant_id: str, quota: Quota) -> tuple[Quota, Quota]:
        """Set all of a tenant's quota, and return it and what counts from now on.

        Raises:
            TenantNotFound: there is no such tenant.
        """
        if await self._tenants.get(tenant_id) is None:
            raise TenantNotFound(tenant_id)
        await self._book.put(tenant_id, quota)
        return self._book.set_for(tenant_id), self._book.of(tenant_id)
