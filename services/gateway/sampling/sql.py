"""Table and store of sampling handles."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Index, func, select, tuple_, update
from sqlalchemy.orm import Mapped, mapped_column

from twinkle_services.gateway.sampling.rules import SamplingHandle
from twinkle_services.gateway.sessions.sql import SessionRow
from twinkle_services.gateway.store.base import Base, SqlStore, delete_all, select_values


class SamplingHandleRow(Base):
    """Table of sampling handles; ids are unique within a tenant only."""

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


class SqlHandleStore(SqlStore):
    """Stores sampling handles. Their ids are unique within a tenant."""

    async def add_if_absent(self, handle: SamplingHandle) -> SamplingHandle:
        """Store the handle unless the tenant has one with that id; return the stored one."""
        return await self._add_if_absent(SamplingHandleRow, handle, key=['tenant_id', 'handle_id'])

    async def get(self, tenant_id: str, handle_id: str) -> SamplingHandle | None:
        """Return the tenant's handle, or None."""
        query = select_values(SamplingHandleRow, SamplingHandle).where(_is_handle(tenant_id, handle_id))
        return await self._fetch_one(query, SamplingHandle)

    async def settle(self, tenant_id: str, handle_id: str, *, base_model: str, version: int | None) -> None:
        """Set the base model and the version if they are unknown; '' and None change nothing.

        An absent handle is ignored.
        """
        row = SamplingHandleRow
        facts = {
            'base_model': func.coalesce(func.nullif(row.base_model, ''), base_model),
            'version': func.coalesce(row.version, version),
        }
        await self._execute(update(row).where(_is_handle(tenant_id, handle_id)).values(facts))

    async def count_clone(self, tenant_id: str, handle_id: str) -> int | None:
        """Add one to the number of copies of a handle's client, and return the number; None if there is no handle."""
        counted = SamplingHandleRow.clone_count + 1
        statement = update(SamplingHandleRow).where(_is_handle(tenant_id, handle_id)).values(clone_count=counted)
        async with self._database.write() as connection:
            rows = await connection.execute(statement.returning(SamplingHandleRow.clone_count))
            return rows.scalar_one_or_none()

    async def list_of_session(self, tenant_id: str, session_id: str) -> Sequence[SamplingHandle]:
        """Return the handles of a session, oldest first."""
        is_one = (SamplingHandleRow.tenant_id == tenant_id) & (SamplingHandleRow.session_id == session_id)
        query = select_values(SamplingHandleRow, SamplingHandle).where(is_one)
        query = query.order_by(SamplingHandleRow.create_time, SamplingHandleRow.handle_id)
        return await self._fetch_all(query, SamplingHandle)

    async def purge(self, *, before: datetime) -> int:
        """Delete the old handles of sessions that are no longer stored, and return their number."""
        row, sessions = SamplingHandleRow, select(SessionRow.tenant_id, SessionRow.session_id)
        is_old = (row.create_time < before) & tuple_(row.tenant_id, row.session_id).not_in(sessions)
        return await delete_all(self._database, row, is_old)


def _is_handle(tenant_id: str, handle_id: str) -> ColumnElement[bool]:
    return (SamplingHandleRow.tenant_id == tenant_id) & (SamplingHandleRow.handle_id == handle_id)
