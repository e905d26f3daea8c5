"""Table and store of sessions."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from sqlalchemy import ForeignKey, Index, String, UniqueConstraint, false, tuple_, update
from sqlalchemy.orm import Mapped, mapped_column

from twinkle_services.gateway.paging import Cursor, Listing, Page
from twinkle_services.gateway.sessions.rules import FinishReason, Session, SessionState
from twinkle_services.gateway.store.base import Base, EnumName, SqlStore, TextTuple, as_row, fetch_one, select_values


class SessionRow(Base):
    """Table of sessions."""

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
    state: Mapped[SessionState] = mapped_column(EnumName(SessionState))
    client: Mapped[str]
    user_metadata: Mapped[Mapping[str, str]]
    finish_reason: Mapped[FinishReason | None] = mapped_column(EnumName(FinishReason))
    create_time: Mapped[datetime]
    heartbeat_time: Mapped[datetime]
    project_id: Mapped[str] = mapped_column(String(64), server_default='')
    is_settled: Mapped[bool] = mapped_column(server_default=false())
    checkpoint_paths: Mapped[tuple[str, ...]] = mapped_column(TextTuple, server_default='[]')


class SqlSessionStore(SqlStore):
    """Stores sessions."""

    async def add_if_absent(self, session: Session) -> Session:
        """Add the session unless the tenant has one with its request id; return the stored one."""
        return await self._add_if_absent(SessionRow, session, key=['tenant_id', 'request_id'])

    async def get(self, tenant_id: str, session_id: str) -> Session | None:
        """Return the tenant's session, or None."""
        is_session = (SessionRow.tenant_id == tenant_id) & (SessionRow.session_id == session_id)
        return await self._fetch_one(select_values(SessionRow, Session).where(is_session), Session)

    async def change(self, tenant_id: str, session_id: str, change: Callable[[Session], Session]) -> Session | None:
        """Replace the session by `change(session)` in one transaction and return it; None for an unknown session.

        Raises:
            DomainError: `change` raised the error; nothing is stored.
        """
        is_session = (SessionRow.tenant_id == tenant_id) & (SessionRow.session_id == session_id)
        query = select_values(SessionRow, Session).where(is_session).with_for_update()
        async with self._database.write() as connection:
            found = await fetch_one(connection, query, Session)
            if found is None:
                return None
            changed = change(found)
            await connection.execute(update(SessionRow).where(is_session).values(as_row(changed)))
            return changed

    async def expire(self, *, silent_since: datetime) -> int:
        """Mark active sessions without a heartbeat since `silent_since` as expired; return their number."""
        is_silent = (SessionRow.state == SessionState.ACTIVE) & (SessionRow.heartbeat_time < silent_since)
        return await self._execute(
            update(SessionRow).where(is_silent).values(state=SessionState.EXPIRED, is_settled=False)
        )

    async def list_unsettled(self, *, after: Cursor | None, size: int) -> Sequence[Session]:
        """Return at most `size` ended sessions of all tenants that are not settled, the oldest heartbeat first.

        `after` contains the last heartbeat and the id of the previous page's last session; None for the first page.
        """
        is_wanted = (SessionRow.state != SessionState.ACTIVE) & SessionRow.is_settled.is_(False)
        key = (SessionRow.heartbeat_time, SessionRow.session_id)
        if after is not None:
            is_wanted &= tuple_(*key) > tuple_(after.create_time, after.item_id)
        query = select_values(SessionRow, Session).where(is_wanted).order_by(*key).limit(size)
        return await self._fetch_all(query, Session)

    async def list_newest(self, tenant_id: str, page: Page) -> Listing[Session]:
        """Return a page, newest first."""
        query = select_values(SessionRow, Session).where(SessionRow.tenant_id == tenant_id)
        return await self._fetch_page(query, Session, page, order=(SessionRow.create_time, SessionRow.session_id))
