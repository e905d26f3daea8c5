"""The verb that makes a project."""

from services.gateway.errors import TenantNotFound
from services.gateway.keys.project import Project
from services.gateway.keys.tenant_ports import ProjectStore, TenantStore
from services.kit.clock import Clock


class CreateProject:
    """Makes a project; one that exists is returned as it is."""

    def __init__(self, tenants: TenantStore, projects: ProjectStore, *, clock: Clock) -> None:
        """Keep projects in `projects`."""
        self._tenants = tenants
        self._projects = projects
        self._clock = clock

    async def __call__(self, tenant_id: str, project_id: str, *, display_name: str) -> Project:
        """Return the project.

        Raises:
            TenantNotFound: there is no such tenant.
        """
        if await self._tenants.get(tenant_id) is None:
            raise TenantNotFound(tenant_id)
        now = self._clock.now()
        project = Project(tenant_id=tenant_id, project_id=project_id, display_name=display_name, create_time=now)
        return await self._projects.add_if_absent(project)
