"""The tables. Columns have the names of the domain's fields, so that rows become values by name.

The schema of a database is made by the migrations alone; a test holds the two together.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, ForeignKey, Index, LargeBinary, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from services.gateway.domain.api_key import Scope, scope_names
from services.gateway.domain.session import FinishReason, SessionState


class UtcDateTime(TypeDecorator[datetime]):
    """A moment, in UTC whatever the database makes of time zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the moment in UTC."""
        del dialect
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return the moment with its zone, which SQLite drops."""
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


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


class SessionStateName(TypeDecorator[SessionState]):
    """A session's state as its name."""

    impl = String(16)
    cache_ok = True

    def process_bind_param(self, value: SessionState | None, dialect: Dialect) -> str | None:
        """Return the name."""
        del dialect
        return None if value is None else value.value

    def process_result_value(self, value: str | None, dialect: Dialect) -> SessionState | None:
        """Return the state."""
        del dialect
        return None if value is None else SessionState(value)


class FinishReasonName(TypeDecorator[FinishReason]):
    """A reason to finish as its name."""

    impl = String(16)
    cache_ok = True

    def process_bind_param(self, value: FinishReason | None, dialect: Dialect) -> str | None:
        """Return the name."""
        del dialect
        return None if value is None else value.value

    def process_result_value(self, value: str | None, dialect: Dialect) -> FinishReason | None:
        """Return the reason."""
        del dialect
        return None if value is None else FinishReason(value)


class Base(DeclarativeBase):
    """What all tables share: how the types of values become columns."""

    type_annotation_map = {  # noqa: RUF012 (the library's own way of declaring it)
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        Mapping[str, str]: JSON,
        frozenset[Scope]: ScopeSet,
        int: BigInteger,
    }


class TenantRow(Base):
    """Owners."""

    __tablename__ = 'tenants'
    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    display_name: Mapped[str]
    create_time: Mapped[datetime]


class ApiKeyRow(Base):
    """API keys, by the digest of their secrets."""

    __tablename__ = 'api_keys'
    __table_args__ = (Index('ix_api_keys_newest', 'tenant_id', 'create_time', 'key_id'),)
    key_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey('tenants.tenant_id'))
    digest: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    scopes: Mapped[frozenset[Scope]]
    display_name: Mapped[str]
    create_time: Mapped[datetime]
    expire_time: Mapped[datetime | None]
    revoke_time: Mapped[datetime | None]


class SessionRow(Base):
    """Sessions."""

    __tablename__ = 'sessions'
    __table_args__ = (
        UniqueConstraint('tenant_id', 'request_id', name='uq_sessions_request'),
        Index('ix_sessions_newest', 'tenant_id', 'create_time', 'session_id'),
        Index('ix_sessions_silent', 'state', 'heartbeat_time'),
    )
    session_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey('tenants.tenant_id'))
    request_id: Mapped[str]
    state: Mapped[SessionState] = mapped_column(SessionStateName)
    client: Mapped[str]
    user_metadata: Mapped[Mapping[str, str]]
    finish_reason: Mapped[FinishReason | None] = mapped_column(FinishReasonName)
    create_time: Mapped[datetime]
    heartbeat_time: Mapped[datetime]


class RunRow(Base):
    """Runs, as last heard from the model service. Their tenants may be ones that only it knows."""

    __tablename__ = 'runs'
    __table_args__ = (Index('ix_runs_newest', 'tenant_id', 'create_time', 'run_id'),)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str]
    base_model: Mapped[str]
    lora_rank: Mapped[int]
    step_count: Mapped[int]
    version: Mapped[int]
    user_metadata: Mapped[Mapping[str, str]]
    is_active: Mapped[bool]
    create_time: Mapped[datetime]
    update_time: Mapped[datetime]


class CheckpointRow(Base):
    """Checkpoints, as last heard from the checkpoint service."""

    __tablename__ = 'checkpoints'
    __table_args__ = (Index('ix_checkpoints_newest', 'tenant_id', 'create_time', 'checkpoint_id'),)
    checkpoint_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str]
    run_id: Mapped[str]
    name: Mapped[str]
    path: Mapped[str]
    base_model: Mapped[str]
    is_optimizer_included: Mapped[bool]
    size_bytes: Mapped[int]
    step_count: Mapped[int]
    digest: Mapped[str]
    folder: Mapped[str]
    create_time: Mapped[datetime]
    expire_time: Mapped[datetime | None]
    delete_time: Mapped[datetime | None]
    """When it was found gone; None: it is there."""
