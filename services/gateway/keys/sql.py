"""Tables and stores of tenants, projects and API keys. Only digests of secrets are stored."""

import hmac
from collections.abc import Callable
from datetime import datetime

from sqlalchemy import Dialect, ForeignKey, Index, LargeBinary, String, select, update
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from twinkle_services.gateway.credentials import Scope
from twinkle_services.gateway.keys.rules import ApiKey, Project, Rotation, Tenant
from twinkle_services.gateway.paging import Listing, Page
from twinkle_services.gateway.store.base import Base, SqlStore, as_row, fetch_one, insert_into, select_values


class ScopeSet(TypeDecorator[frozenset[Scope]]):
    """Set of scopes, stored as their sorted names separated by commas."""

    impl = String(256)
    cache_ok = True

    def process_bind_param(self, value: frozenset[Scope] | None, dialect: Dialect) -> str | None:
        return None if value is None else ','.join(sorted(value))

    def process_result_value(self, value: str | None, dialect: Dialect) -> frozenset[Scope] | None:
        return None if value is None else frozenset(Scope(name) for name in value.split(',') if name)


class TenantRow(Base):
    """Table of tenants."""

    __tablename__ = 'tenants'
    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    display_name: Mapped[str]
    create_time: Mapped[datetime]


class ProjectRow(Base):
    """Table of projects; ids are unique within a tenant only."""

    __tablename__ = 'projects'
    __table_args__ = (Index('ix_projects_newest', 'tenant_id', 'create_time', 'project_id'),)
    tenant_id: Mapped[str] = mapped_column(ForeignKey('tenants.tenant_id'), primary_key=True)
    project_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    display_name: Mapped[str]
    create_time: Mapped[datetime]


class ApiKeyRow(Base):
    """Table of API keys, with the digests of their secrets."""

    __tablename__ = 'api_keys'
    __table_args__ = (Index('ix_api_keys_newest', 'tenant_id', 'create_time', 'key_id'),)
    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey('tenants.tenant_id'))
    digest: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    scopes: Mapped[frozenset[Scope]] = mapped_column(ScopeSet)
    display_name: Mapped[str]
    create_time: Mapped[datetime]
    expire_time: Mapped[datetime | None]
    revoke_time: Mapped[datetime | None]
    project_id: Mapped[str] = mapped_column(String(64), server_default='')
    replaces_key_id: Mapped[str] = mapped_column(String(64), server_default='')
    retire_time: Mapped[datetime | None]


class SqlTenantStore(SqlStore):
    """Stores tenants."""

    async def add_if_absent(self, tenant: Tenant) -> Tenant:
        """Add the tenant unless its id is in use; return the stored tenant with that id."""
        return await self._add_if_absent(TenantRow, tenant, key=['tenant_id'])

    async def get(self, tenant_id: str) -> Tenant | None:
        """Return the tenant, or None."""
        return await self._fetch_one(select_values(TenantRow, Tenant).where(TenantRow.tenant_id == tenant_id), Tenant)

    async def list_newest(self, page: Page) -> Listing[Tenant]:
        """Return a page, newest first."""
        order = (TenantRow.create_time, TenantRow.tenant_id)
        return await self._fetch_page(select_values(TenantRow, Tenant), Tenant, page, order=order)


class SqlProjectStore(SqlStore):
    """Stores projects."""

    async def add_if_absent(self, project: Project) -> Project:
        """Add the project unless the tenant has a project with that id; return the stored project."""
        return await self._add_if_absent(ProjectRow, project, key=['tenant_id', 'project_id'])

    async def get(self, tenant_id: str, project_id: str) -> Project | None:
        """Return the tenant's project, or None."""
        is_project = (ProjectRow.tenant_id == tenant_id) & (ProjectRow.project_id == project_id)
        return await self._fetch_one(select_values(ProjectRow, Project).where(is_project), Project)

    async def list_newest(self, tenant_id: str, page: Page) -> Listing[Project]:
        """Return a page, newest first."""
        query = select_values(ProjectRow, Project).where(ProjectRow.tenant_id == tenant_id)
        return await self._fetch_page(query, Project, page, order=(ProjectRow.create_time, ProjectRow.project_id))


class SqlKeyStore(SqlStore):
    """Stores API keys by the digest of their secrets."""

    async def add(self, key: ApiKey, *, digest: bytes) -> None:
        """Add the key unless the digest is in use."""
        async with self._database.write() as connection:
            insert = insert_into(connection, ApiKeyRow).values(digest=digest, **as_row(key))
            await connection.execute(insert.on_conflict_do_nothing(index_elements=['digest']))

    async def find(self, digest: bytes) -> ApiKey | None:
        """Return the key with this digest, valid or not, or None."""
        columns = select(ApiKeyRow.digest, ApiKeyRow.key_id).where(ApiKeyRow.digest == digest)
        async with self._database.read() as connection:
            row = (await connection.execute(columns)).one_or_none()
            # The database has compared the digests already; this comparison repeats the check in constant time.
            if row is None or not hmac.compare_digest(row.digest, digest):
                return None
            query = select_values(ApiKeyRow, ApiKey).where(ApiKeyRow.key_id == row.key_id)
            return await fetch_one(connection, query, ApiKey)

    async def has_keys(self) -> bool:
        """Return whether any API key is stored, including invalid ones."""
        async with self._database.read() as connection:
            return (await connection.execute(select(ApiKeyRow.key_id).limit(1))).first() is not None

    async def has_valid(self, tenant_id: str, *, moment: datetime) -> bool:
        """Return whether a key of the tenant is valid at `moment`, as `ApiKey.is_valid_at` defines it."""
        ends = (ApiKeyRow.expire_time, ApiKeyRow.retire_time)
        is_valid = (ApiKeyRow.revoke_time.is_(None), *(end.is_(None) | (end > moment) for end in ends))
        query = select(ApiKeyRow.key_id).where(ApiKeyRow.tenant_id == tenant_id, *is_valid).limit(1)
        async with self._database.read() as connection:
            return (await connection.execute(query)).first() is not None

    async def replace(self, key_id: str, rotate: Callable[[ApiKey], Rotation], *, digest: bytes) -> Rotation | None:
        """Store both keys of `rotate(key)` in one transaction, the successor under `digest`; None for an unknown id.

        Raises:
            DomainError: `rotate` raised the error; nothing is stored.
        """
        is_key = ApiKeyRow.key_id == key_id
        query = select_values(ApiKeyRow, ApiKey).where(is_key).with_for_update()
        async with self._database.write() as connection:
            key = await fetch_one(connection, query, ApiKey)
            if key is None:
                return None
            rotation = rotate(key)
            await connection.execute(update(ApiKeyRow).where(is_key).values(as_row(rotation.retired)))
            await connection.execute(
                insert_into(connection, ApiKeyRow).values(digest=digest, **as_row(rotation.successor))
            )
            return rotation

    async def revoke(self, key_id: str, *, moment: datetime) -> ApiKey | None:
        """Revoke the key at `moment`, unless it is already revoked, and return it; None for an unknown key."""
        is_unrevoked = (ApiKeyRow.key_id == key_id) & ApiKeyRow.revoke_time.is_(None)
        query = select_values(ApiKeyRow, ApiKey).where(ApiKeyRow.key_id == key_id)
        async with self._database.write() as connection:
            await connection.execute(update(ApiKeyRow).where(is_unrevoked).values(revoke_time=moment))
            return await fetch_one(connection, query, ApiKey)

    async def list_newest(self, tenant_id: str, page: Page) -> Listing[ApiKey]:
        """Return a page, newest first."""
        query = select_values(ApiKeyRow, ApiKey).where(ApiKeyRow.tenant_id == tenant_id)
        return await self._fetch_page(query, ApiKey, page, order=(ApiKeyRow.create_time, ApiKeyRow.key_id))
