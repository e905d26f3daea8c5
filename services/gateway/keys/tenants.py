"""Operations on tenants and on their projects."""

from twinkle_services.gateway.errors import ProjectNotFound, TenantNotFound
from twinkle_services.gateway.keys.rules import Project, Tenant
from twinkle_services.gateway.keys.sql import SqlProjectStore, SqlTenantStore
from twinkle_services.gateway.paging import Listing, Page
from twinkle_services.kit.clock import Clock


class Tenants:
    """Creates and lists tenants."""

    def __init__(self, store: SqlTenantStore, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def create(self, tenant_id: str, *, display_name: str) -> Tenant:
        """Create a tenant, or return the existing one unchanged."""
        tenant = Tenant(tenant_id=tenant_id, display_name=display_name, create_time=self._clock.now())
        return await self._store.add_if_absent(tenant)

    async def check(self, tenant_id: str) -> None:
        """Check that a tenant exists.

        Raises:
            TenantNotFound: there is no such tenant.
        """
        if await self._store.get(tenant_id) is None:
            raise TenantNotFound(tenant_id)

    async def list(self, page: Page) -> Listing[Tenant]:
        """Return one page of all tenants, newest first."""
        return await self._store.list_newest(page)


class Projects:
    """Creates and lists the projects of tenants. `create` and `list` raise TenantNotFound for an unknown tenant."""

    def __init__(self, store: SqlProjectStore, tenants: Tenants, *, clock: Clock) -> None:
        self._store = store
        self._tenants = tenants
        self._clock = clock

    async def create(self, tenant_id: str, project_id: str, *, display_name: str) -> Project:
        """Create a project, or return the existing one unchanged."""
        await self._tenants.check(tenant_id)
        now = self._clock.now()
        project = Project(tenant_id=tenant_id, project_id=project_id, display_name=display_name, create_time=now)
        return await self._store.add_if_absent(project)

    async def check(self, tenant_id: str, project_id: str) -> None:
        """Check that a tenant has a project; an empty id means no project and passes.

        Raises:
            ProjectNotFound: the tenant has no such project.
        """
        if project_id and await self._store.get(tenant_id, project_id) is None:
            raise ProjectNotFound(project_id)

    async def list(self, tenant_id: str, page: Page) -> Listing[Project]:
        """Return one page of a tenant's projects, newest first."""
        await self._tenants.check(tenant_id)
        return await self._store.list_newest(tenant_id, page)
