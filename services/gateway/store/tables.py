"""The tables. Columns have the names of the domain's fields, so that rows become values by name.

The schema of a database is made by the migrations alone; a test holds the two together.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    LargeBinary,
    String,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from services.gateway.futures.rules import FutureState
from services.gateway.keys.api_key import Scope, scope_names
from services.gateway.sessions.session import FinishReason, SessionState
from services.gateway.store.error_column import ErrorStatus
from services.kit.errors import DomainError


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


class TextTuple(TypeDecorator[tuple[str, ...]]):
    """Texts as a JSON list."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> list[str] | None:
        """Return the list."""
        del dialect
        return None if value is None else list(value)

    def process_result_value(self, value: list[str] | None, dialect: Dialect) -> tuple[str, ...] | None:
        """Return the texts."""
        del dialect
        return None if value is None else tuple(value)


class FutureStateName(TypeDecorator[FutureState]):
    """A future's state as its name."""

    impl = String(16)
    cache_ok = True

    def process_bind_param(self, value: FutureState | None, dialect: Dialect) -> str | None:
        """Return the name."""
        del dialect
        return None if value is None else value.value

    def process_result_value(self, value: str | None, dialect: Dialect) -> FutureState | None:
        """Return the state."""
        del dialect
        return None if value is None else FutureState(value)


_IS_WAITING = text("state = 'waiting'")


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
    project_id: Mapped[str] = mapped_column(String(64), server_default='')
    replaces_key_id: Mapped[str] = mapped_column(String(64), server_default='')
    retire_time: Mapped[datetime | None]


class ProjectRow(Base):
    """Parts of tenants' work; their ids are unique only within a tenant."""

    __tablename__ = 'projects'
    __table_args__ = (Index('ix_projects_newest', 'tenant_id', 'create_time', 'project_id'),)
    tenant_id: Mapped[str] = mapped_column(ForeignKey('tenants.tenant_id'), primary_key=True)
    project_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    display_name: Mapped[str]
    create_time: Mapped[datetime]


class SessionRow(Base):
    """Sessions."""

    __tablename__ = 'sessions'
    __table_args__ = (
        UniqueConstraint('tenant_id', 'request_id', name='uq_sessions_request'),
        Index('ix_sessions_newest', 'tenant_id', 'create_time', 'session_id'),
        Index('ix_sessions_silent', 'state', 'heartbeat_time'),
        Index('ix_sessions_unsettled', 'is_settled', 'heartbeat_time', 'session_id'),
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
    project_id: Mapped[str] = mapped_column(String(64), server_default='')
    is_settled: Mapped[bool] = mapped_column(server_default=false())
    checkpoint_paths: Mapped[tuple[str, ...]] = mapped_column(TextTuple, server_default='[]')


class RunRow(Base):
    """Runs, as last heard from the model service. Their tenants may be ones that only it knows."""

    __tablename__ = 'runs'
    __table_args__ = (
        Index('ix_runs_newest', 'tenant_id', 'create_time', 'run_id'),
        Index('ix_runs_session', 'tenant_id', 'session_id'),
    )
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    base_model: Mapped[str]
    lora_rank: Mapped[int]
    step_count: Mapped[int]
    version: Mapped[int]
    user_metadata: Mapped[Mapping[str, str]]
    is_active: Mapped[bool]
    create_time: Mapped[datetime]
    update_time: Mapped[datetime]
    session_id: Mapped[str] = mapped_column(server_default='')


class CheckpointRow(Base):
    """Checkpoints, as last heard from the checkpoint service."""

    __tablename__ = 'checkpoints'
    __table_args__ = (Index('ix_checkpoints_newest', 'tenant_id', 'create_time', 'checkpoint_id'),)
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    checkpoint_id: Mapped[str] = mapped_column(primary_key=True)
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
    is_public: Mapped[bool] = mapped_column(server_default=false())
    user_metadata: Mapped[Mapping[str, str]] = mapped_column(server_default='{}')
    lora_rank: Mapped[int] = mapped_column(server_default='0')
    delete_time: Mapped[datetime | None]
    """When it was found gone; None: it is there."""


class FutureRow(Base):
    """Futures, without their requests and results."""

    __tablename__ = 'futures'
    __table_args__ = (
        Index('ix_futures_lane', 'tenant_id', 'lane', 'position'),
        Index('ix_futures_state', 'state', 'finish_time'),
        Index('ix_futures_topic', 'tenant_id', 'topic', 'finish_time'),
        Index(
            'ix_futures_waiting', 'tenant_id', 'lane', 'owner', postgresql_where=_IS_WAITING, sqlite_where=_IS_WAITING
        ),
    )
    future_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str]
    session_id: Mapped[str]
    kind: Mapped[str]
    key: Mapped[str]
    lane: Mapped[str]
    position: Mapped[int]
    note: Mapped[str]
    fingerprint: Mapped[str]
    state: Mapped[FutureState] = mapped_column(FutureStateName)
    create_time: Mapped[datetime]
    number: Mapped[int | None]
    finish_time: Mapped[datetime | None]
    error: Mapped[DomainError | None] = mapped_column(ErrorStatus)
    topic: Mapped[str] = mapped_column(server_default='')
    base_model: Mapped[str] = mapped_column(server_default='')
    owner: Mapped[str] = mapped_column(String(64), server_default='')


class GatewayRow(Base):
    """Gateways that are there, on a database that several share."""

    __tablename__ = 'gateways'
    gateway_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    payload_store_id: Mapped[str] = mapped_column(String(64))
    heartbeat_time: Mapped[datetime]
    """On the database's clock."""


class SamplingHandleRow(Base):
    """Handles of weights to sample from; their ids are clients' and need be unique only within a tenant."""

    __tablename__ = 'sampling_handles'
    __table_args__ = (Index('ix_sampling_handles_session', 'tenant_id', 'session_id', 'create_time'),)
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    handle_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str]
    base_model: Mapped[str]
    checkpoint_path: Mapped[str]
    adapter_id: Mapped[str]
    future_id: Mapped[str]
    version: Mapped[int | None]
    is_inflight: Mapped[bool]
    clone_count: Mapped[int]
    create_time: Mapped[datetime]


class QuotaRow(Base):
    """Quotas that were set; a limit that is null is as configured."""

    __tablename__ = 'quotas'
    tenant_id: Mapped[str] = mapped_column(String(64), ForeignKey('tenants.tenant_id'), primary_key=True)
    max_adapters: Mapped[int | None]
    tokens_per_second: Mapped[int | None]
    burst_tokens: Mapped[int | None]
    concurrent_samples: Mapped[int | None]
    stored_bytes: Mapped[int | None]
    weight: Mapped[float | None]


class UsageRow(Base):
    """What tenants used, by run and hour."""

    __tablename__ = 'usage'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    hour: Mapped[datetime] = mapped_column(primary_key=True)
    trained_token_count: Mapped[int]
    sampled_token_count: Mapped[int]
    prompt_token_count: Mapped[int]
    operation_count: Mapped[int]
    prompt_count: Mapped[int]


class UsageMeterRow(Base):
    """How far each run's meter at the model service was put down."""

    __tablename__ = 'usage_meters'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    trained_token_count: Mapped[int]
    operation_count: Mapped[int]


class UsageWriterRow(Base):
    """The last batch of each process that counts, so that none is put down twice."""

    __tablename__ = 'usage_writers'
    writer_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int]
