"""The verb that makes a tenant."""

from services.gateway.keys.tenant import Tenant
from services.gateway.keys.tenant_ports import TenantStore
from services.kit.clock import Clock


class CreateTenant:
    """Makes a tenant; one that exists is returned as it is."""

    def __init__(self, tenants: TenantStore, *, clock: Clock) -> None:
        """Keep tenants in `tenants`."""
        self._tenants = tenants
        self._clock = clock

    async def __call__(self, tenant_id: str, *, display_name: str) -> Tenant:
        """Return the tenant."""
        tenant = Tenant(tenant_id=tenant_id, display_name=display_name, create_time=self._clock.now())
        return await self._tenants.add_if_absent(tenant)
