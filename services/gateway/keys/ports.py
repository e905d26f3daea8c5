"""Storage ports for tenants, projects and API keys."""

from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from twinkle_services.gateway.keys.rules import ApiKey, Project, Rotation, Tenant
from twinkle_services.gateway.paging import Listing, Page


class TenantStore(Protocol):
    """Stores tenants."""

    async def add_if_absent(self, tenant: Tenant) -> Tenant:
        """Add the tenant unless its id is in use; return the stored tenant with that id."""
        ...

    async def get(self, tenant_id: str) -> Tenant | None:
        """Return the tenant, or None."""
        ...

    async def list_newest(self, page: Page) -> Listing[Tenant]:
        """Return a page, newest first."""
        ...


class ProjectStore(Protocol):
    """Stores projects."""

    async def add_if_absent(self, project: Project) -> Project:
        """Add the project unless the tenant has a project with that id; return the stored project."""
        ...

    async def get(self, tenant_id: str, project_id: str) -> Project | None:
        """Return the tenant's project, or None."""
        ...

    async def list_newest(self, tenant_id: str, page: Page) -> Listing[Project]:
        """Return a page, newest first."""
        ...


class KeyStore(Protocol):
    """Stores API keys by the digest of their secrets."""

    async def add(self, key: ApiKey, *, digest: bytes) -> None:
        """Add the key unless the digest is in use."""
        ...

    async def find(self, digest: bytes) -> ApiKey | None:
        """Return the key with this digest, valid or not, or None."""
        ...

    async def has_valid(self, tenant_id: str, *, moment: datetime) -> bool:
        """Return whether a key of the tenant is valid at `moment`, as `ApiKey.is_valid_at` defines it."""
        ...

    async def replace(self, key_id: str, rotate: Callable[[ApiKey], Rotation], *, digest: bytes) -> Rotation | None:
        """Store both keys of `rotate(key)` in one transaction, the successor under `digest`; None for an unknown id.

        Raises:
            DomainError: `rotate` raised the error; nothing is stored.
        """
        ...

    async def revoke(self, key_id: str, *, moment: datetime) -> ApiKey | None:
        """Revoke the key at `moment`, unless it is already revoked, and return it; None for an unknown key."""
        ...

    async def list_newest(self, tenant_id: str, page: Page) -> Listing[ApiKey]:
        """Return a page, newest first."""
        ...
