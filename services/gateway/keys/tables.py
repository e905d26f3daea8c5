"""Tables of tenants, projects and keys."""

from datetime import datetime

from sqlalchemy import Dialect, ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from services.gateway.keys.api_key import Scope, scope_names
from services.gateway.store.base import Base


class ScopeSet(TypeDecorator[frozenset[Scope]]):
    """Scopes as their names, joined by commas."""

    impl = String(256)
    cache_ok = True

    def process_bind_param(self, value: frozenset[Scope] | None, dialect: Dialect) -> str | None:
        """Return the names, sorted."""
        del dialect
        return None if value is None else ','.join(scope_names(value))

    def process_result_value(self, value: str | None, dialect: Dialect) -> frozenset[Scope] | None:
        """Return the scopes."""
        del dialect
        return None if value is None else frozenset(Scope(name) for name in value.split(',') if name)


class TenantRow(Base):
    """Tenants."""

    __tablename__ = 'tenants'
    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    display_name: Mapped[str]
    create_time: Mapped[datetime]


class ApiKeyRow(Base):
    """API keys; secrets are stored as digests only."""

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


class ProjectRow(Base):
    """Projects; ids are unique within a tenant only."""

    __tablename__ = 'projects'
    __table_args__ = (Index('ix_projects_newest', 'tenant_id', 'create_time', 'project_id'),)
    tenant_id: Mapped[str] = mapped_column(ForeignKey('tenants.tenant_id'), primary_key=True)
    project_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    display_name: Mapped[str]
    create_time: Mapped[datetime]
