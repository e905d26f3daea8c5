"""Tables of futures and of the gateways that share a database."""

from datetime import datetime

from sqlalchemy import Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from services.gateway.futures.rules import FutureState
from services.gateway.store.base import Base, EnumName, ErrorStatus
from services.kit.errors import DomainError

_IS_WAITING = text("state = 'waiting'")


class FutureRow(Base):
    """Futures; their requests and results are payload files."""

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
    state: Mapped[FutureState] = mapped_column(EnumName(FutureState))
    create_time: Mapped[datetime]
    number: Mapped[int | None]
    finish_time: Mapped[datetime | None]
    error: Mapped[DomainError | None] = mapped_column(ErrorStatus)
    topic: Mapped[str] = mapped_column(server_default='')
    base_model: Mapped[str] = mapped_column(server_default='')
    owner: Mapped[str] = mapped_column(String(64), server_default='')


class GatewayRow(Base):
    """Live gateways of a database that several gateways share."""

    __tablename__ = 'gateways'
    gateway_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    payload_store_id: Mapped[str] = mapped_column(String(64))
    heartbeat_time: Mapped[datetime]
    """Time of the last heartbeat, by the database's clock."""
