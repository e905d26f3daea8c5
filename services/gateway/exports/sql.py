"""Exports in SQL."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import (
    ColumnElement,
    Index,
    LargeBinary,
    String,
    UniqueConstraint,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapped, mapped_column

from services.gateway.exports.rules import Export, ExportState
from services.gateway.paging import Page
from services.gateway.store.base import Base, EnumName, ErrorStatus
from services.gateway.store.database import Database
from services.gateway.store.statements import (
    as_row,
    fetch_all,
    fetch_one,
    insert_into,
    newest_first,
    select_values,
)
from services.kit.errors import DomainError, QuotaExceeded

_OPEN = (ExportState.WAITING, ExportState.RUNNING)


class ExportRow(Base):
    """Exports of checkpoints, with what they need to be carried on by any gateway."""

    __tablename__ = 'exports'
    __table_args__ = (
        UniqueConstraint('tenant_id', 'request_id', name='uq_exports_request'),
        Index('ix_exports_newest', 'tenant_id', 'create_time', 'export_id'),
        Index('ix_exports_due', 'state', 'due_time'),
    )
    export_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str]
    request_id: Mapped[str]
    checkpoint_path: Mapped[str]
    digest: Mapped[str]
    target: Mapped[str]
    is_private: Mapped[bool]
    sealed_token: Mapped[bytes] = mapped_column(LargeBinary)
    state: Mapped[ExportState] = mapped_column(EnumName(ExportState))
    read_bytes: Mapped[int]
    size_bytes: Mapped[int]
    attempt_count: Mapped[int]
    url: Mapped[str]
    commit: Mapped[str]
    error: Mapped[DomainError | None] = mapped_column(ErrorStatus)
    create_time: Mapped[datetime]
    update_time: Mapped[datetime]
    due_time: Mapped[datetime]


class SqlExportStore:
    """Implements `ports.ExportStore`. A claim is told from a later one by the number of its try."""

    def __init__(self, database: Database) -> None:
        """Keep them in `database`."""
        self._database = database

    async def add_if_absent(self, export: Export, *, is_same: Callable[[Export], bool], most_unfinished: int) -> Export:
        """Keep the export, or leave the one in its place; see the port."""
        is_request = _is_request(export.tenant_id, export.request_id)
        async with self._database.write() as connection:
            kept = await _one(connection, is_request)
            if kept is not None:
                return kept
            unfinished = await _unfinished(connection, export.tenant_id)
            same = next(filter(is_same, unfinished), None)
            if same is not None:
                return same
            if len(unfinished) >= most_unfinished:
                raise QuotaExceeded('unfinished_exports', most_unfinished)
            insert = insert_into(connection, ExportRow).values(as_row(export))
            await connection.execute(insert.on_conflict_do_nothing(index_elements=['tenant_id', 'request_id']))
            return await _one(connection, is_request) or export

    async def find_request(self, tenant_id: str, request_id: str) -> Export | None:
        """Return the tenant's export of that request id, or None."""
        async with self._database.read() as connection:
            return await _one(connection, _is_request(tenant_id, request_id))

    async def get(self, tenant_id: str, export_id: str) -> Export | None:
        """Return the tenant's export, or None."""
        async with self._database.read() as connection:
            return await _one(connection, _is_it(tenant_id, export_id))

    async def list_newest(self, tenant_id: str, page: Page, *, checkpoint_path: str | None) -> Sequence[Export]:
        """Return one item more than the page where there are as many, newest first."""
        query = select_values(ExportRow, Export).where(ExportRow.tenant_id == tenant_id)
        if checkpoint_path is not None:
            query = query.where(ExportRow.checkpoint_path == checkpoint_path)
        query = newest_first(query, page, time=ExportRow.create_time, item_id=ExportRow.export_id)
        async with self._database.read() as connection:
            return await fetch_all(connection, query, Export)

    async def claim(self, now: datetime, *, lease: timedelta) -> Export | None:
        """Begin the export that has been due the longest; see the port."""
        is_due = ExportRow.state.in_(_OPEN) & (ExportRow.due_time <= now)
        query = select_values(ExportRow, Export).where(is_due).order_by(ExportRow.due_time).limit(1)
        async with self._database.write() as connection:
            found = await fetch_one(connection, query.with_for_update(skip_locked=True), Export)
            if found is None:
                return None
            claimed = replace(
                found,
                state=ExportState.RUNNING,
                attempt_count=found.attempt_count + 1,
                read_bytes=0,
                update_time=now,
                due_time=now + lease,
            )
            await connection.execute(
                update(ExportRow).where(ExportRow.export_id == found.export_id).values(as_row(claimed))
            )
            return claimed

    async def keep(self, export: Export, *, read_bytes: int, size_bytes: int, now: datetime, lease: timedelta) -> bool:
        """Note how far a claimed export is; see the port."""
        values = {'read_bytes': read_bytes, 'size_bytes': size_bytes, 'update_time': now, 'due_time': now + lease}
        async with self._database.write() as connection:
            changed = await connection.execute(update(ExportRow).where(_is_claim(export)).values(values))
            return changed.rowcount > 0

    async def settle(self, export: Export) -> bool:
        """Write how a claimed export went; see the port."""
        async with self._database.write() as connection:
            changed = await connection.execute(update(ExportRow).where(_is_claim(export)).values(as_row(export)))
            return changed.rowcount > 0

    async def cancel(self, tenant_id: str, export_id: str, *, now: datetime) -> Export | None:
        """Cancel an export unless it is over; see the port."""
        is_it = _is_it(tenant_id, export_id)
        values = {'state': ExportState.CANCELLED, 'sealed_token': b'', 'error': None, 'update_time': now}
        async with self._database.write() as connection:
            await connection.execute(update(ExportRow).where(is_it & ExportRow.state.in_(_OPEN)).values(values))
            return await _one(connection, is_it)

    async def forget(self, *, before: datetime) -> int:
        """Forget the exports that were over before that moment."""
        is_old = ExportRow.state.not_in(_OPEN) & (ExportRow.update_time < before)
        async with self._database.write() as connection:
            return (await connection.execute(delete(ExportRow).where(is_old))).rowcount


async def _unfinished(connection: AsyncConnection, tenant_id: str) -> Sequence[Export]:
    """Return a tenant's exports that are not over, oldest first; nobody adds another until the transaction ends."""
    if connection.dialect.name == 'postgresql':
        await connection.execute(select(func.pg_advisory_xact_lock(_lock_of(tenant_id))))
    is_open = (ExportRow.tenant_id == tenant_id) & ExportRow.state.in_(_OPEN)
    query = select_values(ExportRow, Export).where(is_open).order_by(ExportRow.create_time, ExportRow.export_id)
    return await fetch_all(connection, query, Export)


def _lock_of(tenant_id: str) -> int:
    """Return the number of the advisory lock of a tenant's new exports."""
    digest = hashlib.blake2s(f'exports\0{tenant_id}'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big', signed=True)


def _is_it(tenant_id: str, export_id: str) -> ColumnElement[bool]:
    return (ExportRow.tenant_id == tenant_id) & (ExportRow.export_id == export_id)


def _is_request(tenant_id: str, request_id: str) -> ColumnElement[bool]:
    return (ExportRow.tenant_id == tenant_id) & (ExportRow.request_id == request_id)


def _is_claim(export: Export) -> ColumnElement[bool]:
    is_it = _is_it(export.tenant_id, export.export_id)
    return is_it & (ExportRow.state == ExportState.RUNNING) & (ExportRow.attempt_count == export.attempt_count)


async def _one(connection: AsyncConnection, is_it: ColumnElement[bool]) -> Export | None:
    return await fetch_one(connection, select_values(ExportRow, Export).where(is_it), Export)
