"""The verb that lists projects."""

from services.gateway.errors import TenantNotFound
from services.gateway.keys.project import Project
from services.gateway.keys.tenant_ports import ProjectStore, TenantStore
from services.gateway.paging import Cursor, Listing, Page, list_page


class ListProjects:
    """Lists a tenant's projects, newest first."""

    def __init__(self, tenants: TenantStore, projects: ProjectStore) -> None:
        """List what `projects` keeps."""
        self._tenants = tenants
        self._projects = projects

    async def __call__(self, tenant_id: str, page: Page) -> Listing[Project]:
        """Return one page.

        Raises:
            TenantNotFound: there is no such tenant.
        """
        if await self._tenants.get(tenant_id) is None:
            raise TenantNotFound(tenant_id)
        found = await self._projects.list_newest(tenant_id, page)
        return list_page(found, page, cursor_of=lambda project: Cursor(project.create_time, project.project_id))
