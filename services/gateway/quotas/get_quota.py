"""The verb that says what a tenant may use."""

from services.gateway.errors import TenantNotFound
from services.gateway.keys.ports import TenantStore
from services.gateway.quotas.book import QuotaBook
from services.gateway.quotas.rules import Quota


class GetQuota:
    """Finds quotas."""

    def __init__(self, tenants: TenantStore, book: QuotaBook) -> None:
        """Find them in `book`."""
        self._tenants = tenants
        self._book = book

    async def __call__(self, tenant_id: str) -> tuple[Quota, Quota]:
        """Return what was set, and what counts.

        Raises:
            TenantNotFound: there is no such tenant.
        """
        if await self._tenants.get(tenant_id) is None:
            raise TenantNotFound(tenant_id)
        await self._book.read()
        return self._book.set_for(tenant_id), self._book.of(tenant_id)
