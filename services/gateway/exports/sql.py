"""Table and store of exports."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Index, LargeBinary, String, UniqueConstraint, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapped, mapped_column

from twinkle_services.gateway.exports.rules import Export, ExportState
from twinkle_services.gateway.paging import Listing, Page
from twinkle_services.gateway.store.base import (
    Base,
    EnumName,
    ErrorStatus,
    SqlStore,
    as_row,
    fetch_all,
    fetch_one,
    insert_into,
    lock_key,
    select_values,
)
from twinkle_services.kit.errors import DomainError, QuotaExceeded

_UNFINISHED = (ExportState.WAITING, ExportState.RUNNING)


class ExportRow(Base):
    """Table of exports."""

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


class SqlExportStore(SqlStore):
    """Stores exports durably. Several gateways may share one store.

    The attempt count distinguishes a claim from later claims of the same export.
    """

    async def add_if_absent(self, export: Export, *, is_same: Callable[[Export], bool], max_unfinished: int) -> Export:
        """Add the export unless an equivalent one exists; return the stored one.

        The equivalent export is the tenant's export with the same request id. Without such an export, it is the
        tenant's oldest unfinished export for which `is_same` holds. Concurrent equivalent requests add one export.

        Raises:
            QuotaExceeded: the export is new, and the tenant has `max_unfinished` unfinished exports.
        """
        is_request = _is_request(export.tenant_id, export.request_id)
        async with self._database.write() as connection:
            stored = await _one(connection, is_request)
            if stored is not None:
                return stored
            unfinished = await _unfinished(connection, export.tenant_id)
            same = next(filter(is_same, unfinished), None)
            if same is not None:
                return same
            if len(unfinished) >= max_unfinished:
                raise QuotaExceeded('unfinished_exports', max_unfinished)
            insert = insert_into(connection, ExportRow).values(as_row(export))
            await connection.execute(insert.on_conflict_do_nothing(index_elements=['tenant_id', 'request_id']))
            return await _one(connection, is_request) or export

    async def find_request(self, tenant_id: str, request_id: str) -> Export | None:
        query = select_values(ExportRow, Export).where(_is_request(tenant_id, request_id))
        return await self._fetch_one(query, Export)

    async def get(self, tenant_id: str, export_id: str) -> Export | None:
        query = select_values(ExportRow, Export).where(_is_export(tenant_id, export_id))
        return await self._fetch_one(query, Export)

    async def list_newest(self, tenant_id: str, page: Page, *, checkpoint_path: str | None) -> Listing[Export]:
        """Return a page, newest first."""
        query = select_values(ExportRow, Export).where(ExportRow.tenant_id == tenant_id)
        if checkpoint_path is not None:
            query = query.where(ExportRow.checkpoint_path == checkpoint_path)
        return await self._fetch_page(query, Export, page, order=(ExportRow.create_time, ExportRow.export_id))

    async def claim(self, now: datetime, *, lease: timedelta) -> Export | None:
        """Claim the export that has been due longest, and count an attempt; return None if no export is due.

        No other gateway can claim the export until it is settled, or `lease` has passed without a renewal.
        """
        is_due = ExportRow.state.in_(_UNFINISHED) & (ExportRow.due_time <= now)
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
            is_export = ExportRow.export_id == found.export_id
            await connection.execute(update(ExportRow).where(is_export).values(as_row(claimed)))
            return claimed

    async def renew(self, export: Export, *, read_bytes: int, size_bytes: int, now: datetime, lease: timedelta) -> bool:
        """Record the progress of a claimed export and renew its lease; return False if the claim was lost."""
        values = {'read_bytes': read_bytes, 'size_bytes': size_bytes, 'update_time': now, 'due_time': now + lease}
        return await self._execute(update(ExportRow).where(_is_claim(export)).values(values)) > 0

    async def settle(self, export: Export) -> bool:
        """Store the outcome of a claimed export. If the claim was lost, store nothing and return False."""
        return await self._execute(update(ExportRow).where(_is_claim(export)).values(as_row(export))) > 0

    async def cancel(self, tenant_id: str, export_id: str, *, now: datetime) -> Export | None:
        """Cancel an export unless it is finished; return its current state, or None if it is unknown."""
        is_export = _is_export(tenant_id, export_id)
        values = {'state': ExportState.CANCELLED, 'sealed_token': b'', 'error': None, 'update_time': now}
        change = update(ExportRow).where(is_export & ExportRow.state.in_(_UNFINISHED)).values(values)
        async with self._database.write() as connection:
            await connection.execute(change)
            return await _one(connection, is_export)

    async def delete_finished(self, *, before: datetime) -> int:
        """Delete the exports that finished before a time; return the number of deleted exports."""
        is_old = ExportRow.state.not_in(_UNFINISHED) & (ExportRow.update_time < before)
        return await self._execute(delete(ExportRow).where(is_old))


async def _unfinished(connection: AsyncConnection, tenant_id: str) -> Sequence[Export]:
    """Return a tenant's unfinished exports, oldest first, and block other additions until the transaction ends."""
    if connection.dialect.name == 'postgresql':
        await connection.execute(select(func.pg_advisory_xact_lock(lock_key(f'exports\0{tenant_id}'))))
    is_open = (ExportRow.tenant_id == tenant_id) & ExportRow.state.in_(_UNFINISHED)
    query = select_values(ExportRow, Export).where(is_open).order_by(ExportRow.create_time, ExportRow.export_id)
    return await fetch_all(connection, query, Export)


def _is_export(tenant_id: str, export_id: str) -> ColumnElement[bool]:
    return (ExportRow.tenant_id == tenant_id) & (ExportRow.export_id == export_id)


def _is_request(tenant_id: str, request_id: str) -> ColumnElement[bool]:
    return (ExportRow.tenant_id == tenant_id) & (ExportRow.request_id == request_id)


def _is_claim(export: Export) -> ColumnElement[bool]:
    is_export = _is_export(export.tenant_id, export.export_id)
    return is_export & (ExportRow.state == ExportState.RUNNING) & (ExportRow.attempt_count == export.attempt_count)


async def _one(connection: AsyncConnection, condition: ColumnElement[bool]) -> Export | None:
    return await fetch_one(connection, select_values(ExportRow, Export).where(condition), Export)
