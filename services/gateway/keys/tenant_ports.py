"""Who owns things, and the parts of their work, kept."""

from collections.abc import Sequence
from typing import Protocol

from services.gateway.keys.project import Project
from services.gateway.keys.tenant import Tenant
from services.gateway.paging import Page


class TenantStore(Protocol):
    """Keeps tenants."""

    async def add_if_absent(self, tenant: Tenant) -> Tenant:
        """Keep the tenant, or leave the one of that id as it is; return what is kept."""
        ...

    async def get(self, tenant_id: str) -> Tenant | None:
        """Return the tenant, or None."""
        ...

    async def list_newest(self, page: Page) -> Sequence[Tenant]:
        """Return one item more than the page where there are as many, newest first."""
        ...


class ProjectStore(Protocol):
    """Keeps projects."""

    async def add_if_absent(self, project: Project) -> Project:
        """Keep the project, or leave the tenant's one of that id as it is; return what is kept."""
        ...

    async def get(self, tenant_id: str, project_id: str) -> Project | None:
        """Return the tenant's project, or None."""
        ...

    async def list_newest(self, tenant_id: str, page: Page) -> Sequence[Project]:
        """Return one item more than the page where there are as many, newest first."""
        ...
