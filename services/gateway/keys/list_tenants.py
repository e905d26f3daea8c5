"""The verb that lists tenants."""

from services.gateway.keys.tenant import Tenant
from services.gateway.keys.tenant_ports import TenantStore
from services.gateway.paging import Cursor, Listing, Page, list_page


class ListTenants:
    """Lists all tenants, newest first."""

    def __init__(self, tenants: TenantStore) -> None:
        """List what `tenants` keeps."""
        self._tenants = tenants

    async def __call__(self, page: Page) -> Listing[Tenant]:
        """Return one page."""
        found = await self._tenants.list_newest(page)
        return list_page(found, page, cursor_of=lambda tenant: Cursor(tenant.create_time, tenant.tenant_id))
