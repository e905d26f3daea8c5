"""Lists of runs, checkpoints and sessions by offset, with total counts, for clients of the Tinker API."""

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.orm import InstrumentedAttribute

from services.gateway.catalogue.rules import Checkpoint, Run
from services.gateway.catalogue.sql import CheckpointRow, RunRow
from services.gateway.paging import Counted, Slice
from services.gateway.sessions.rules import Session
from services.gateway.sessions.sql import SessionRow
from services.gateway.store.base import Base
from services.gateway.store.database import Database
from services.gateway.store.statements import fetch_all, select_values

Item = TypeVar('Item')


class SqlBrowser:
    """Reads the catalogue and the sessions of a tenant, newest first unless a method says otherwise."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def runs(self, tenant_id: str, part: Slice, *, project_id: str = '') -> Counted[Run]:
        """Return a slice of the tenant's runs, limited to the sessions of a project unless it is empty."""
        condition = RunRow.tenant_id == tenant_id
        if project_id:
            condition &= RunRow.session_id.in_(_sessions_of(tenant_id, project_id))
        return await self._slice(Run, RunRow, condition, order=(RunRow.create_time, RunRow.run_id), part=part)

    async def checkpoints(self, tenant_id: str, part: Slice) -> Counted[Checkpoint]:
        """Return a slice of the tenant's checkpoints."""
        order = (CheckpointRow.create_time, CheckpointRow.checkpoint_id)
        return await self._slice(Checkpoint, CheckpointRow, _is_existing(tenant_id), order=order, part=part)

    async def sessions(self, tenant_id: str, part: Slice, *, project_id: str = '') -> Counted[Session]:
        """Return a slice of the tenant's sessions, limited to a project unless it is empty, in their stored states."""
        order = (SessionRow.create_time, SessionRow.session_id)
        condition = SessionRow.tenant_id == tenant_id
        if project_id:
            condition &= SessionRow.project_id == project_id
        return await self._slice(Session, SessionRow, condition, order=order, part=part)

    async def checkpoints_of(self, tenant_id: str, run_ids: Collection[str]) -> Sequence[Checkpoint]:
        """Return the checkpoints of some runs, newest first."""
        condition = _is_existing(tenant_id) & CheckpointRow.run_id.in_(run_ids)
        query = select_values(CheckpointRow, Checkpoint).where(condition)
        query = query.order_by(CheckpointRow.create_time.desc(), CheckpointRow.checkpoint_id.desc())
        async with self._database.read() as connection:
            return await fetch_all(connection, query, Checkpoint)

    async def run_ids(self, tenant_id: str, *, session_id: str) -> Sequence[str]:
        """Return the ids of the runs that a session created, oldest first."""
        condition = (RunRow.tenant_id == tenant_id) & (RunRow.session_id == session_id)
        query = select(RunRow.run_id).where(condition).order_by(RunRow.create_time, RunRow.run_id)
        async with self._database.read() as connection:
            return list((await connection.execute(query)).scalars())

    async def stored(self, tenant_id: str, *, session_id: str = '', project_id: str = '') -> tuple[int, int]:
        """Return number and bytes of the tenant's checkpoints, limited to the runs of a session or a project."""
        condition = _is_existing(tenant_id)
        of_runs = select(RunRow.run_id).where(RunRow.tenant_id == tenant_id)
        if session_id:
            condition &= CheckpointRow.run_id.in_(of_runs.where(RunRow.session_id == session_id))
        if project_id:
            of_project = RunRow.session_id.in_(_sessions_of(tenant_id, project_id))
            condition &= CheckpointRow.run_id.in_(of_runs.where(of_project))
        query = select(func.count(), func.coalesce(func.sum(CheckpointRow.size_bytes), 0)).where(condition)
        async with self._database.read() as connection:
            count, size_bytes = (await connection.execute(query)).one()
            return int(count), int(size_bytes)

    async def _slice(
        self,
        value_class: type[Item],
        row_class: type[Base],
        condition: ColumnElement[bool],
        *,
        order: tuple[InstrumentedAttribute[Any], ...],
        part: Slice,
    ) -> Counted[Item]:
        query = select_values(row_class, value_class).where(condition).order_by(*(column.desc() for column in order))
        async with self._database.read() as connection:
            items = await fetch_all(connection, query.offset(part.offset).limit(part.limit), value_class)
            count = (
                await connection.execute(select(func.count()).select_from(row_class).where(condition))
            ).scalar_one()
            return Counted(items, count)


def _is_existing(tenant_id: str) -> ColumnElement[bool]:
    return (CheckpointRow.tenant_id == tenant_id) & CheckpointRow.delete_time.is_(None)


def _sessions_of(tenant_id: str, project_id: str) -> Select[str]:
    condition = (SessionRow.tenant_id == tenant_id) & (SessionRow.project_id == project_id)
    return select(SessionRow.session_id).where(condition)
