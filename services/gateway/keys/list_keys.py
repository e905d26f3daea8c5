"""The verb that lists API keys."""

from services.gateway.errors import TenantNotFound
from services.gateway.keys.api_key import ApiKey
from services.gateway.keys.ports import KeyStore
from services.gateway.keys.tenant_ports import TenantStore
from services.gateway.paging import Cursor, Listing, Page, list_page


class ListKeys:
    """Lists a tenant's keys, newest first."""

    def __init__(self, tenants: TenantStore, keys: KeyStore) -> None:
        """List what `keys` keeps."""
        self._tenants = tenants
        self._keys = keys

    async def __call__(self, tenant_id: str, page: Page) -> Listing[ApiKey]:
        """Return one page.

        Raises:
            TenantNotFound: there is no such tenant.
        """
        if await self._tenants.get(tenant_id) is None:
            raise TenantNotFound(tenant_id)
        found = await self._keys.list_newest(tenant_id, page)
        return list_page(found, page, cursor_of=lambda key: Cursor(key.create_time, key.key_id))
