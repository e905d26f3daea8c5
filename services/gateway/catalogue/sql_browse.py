"""Lists by place and count, for the API whose clients page that way."""

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
    """Reads what a tenant has."""

    def __init__(self, database: Database) -> None:
        """Read from `database`."""
        self._database = database

    async def runs(self, tenant_id: str, part: Slice, *, project_id: str = '') -> Counted[Run]:
        """Return some of the tenant's runs; with a project, only of the sessions that belong to it."""
        is_it = RunRow.tenant_id == tenant_id
        if project_id:
            is_it &= RunRow.session_id.in_(_sessions_of(tenant_id, project_id))
        return await self._some(Run, RunRow, is_it, order=(RunRow.create_time, RunRow.run_id), part=part)

    async def checkpoints(self, tenant_id: str, part: Slice) -> Counted[Checkpoint]:
        """Return some of the tenant's checkpoints."""
        order = (CheckpointRow.create_time, CheckpointRow.checkpoint_id)
        return await self._some(Checkpoint, CheckpointRow, _is_kept(tenant_id), order=order, part=part)

    async def sessions(self, tenant_id: str, part: Slice, *, project_id: str = '') -> Counted[Session]:
        """Return some of the tenant's sessions, or of a project's, in the state that was written down last."""
        order = (SessionRow.create_time, SessionRow.session_id)
        is_it = SessionRow.tenant_id == tenant_id
        if project_id:
            is_it &= SessionRow.project_id == project_id
        return await self._some(Session, SessionRow, is_it, order=order, part=part)

    async def checkpoints_of(self, tenant_id: str, run_ids: Collection[str]) -> Sequence[Checkpoint]:
        """Return the checkpoints of some runs, newest first."""
        is_of_them = _is_kept(tenant_id) & CheckpointRow.run_id.in_(run_ids)
        query = select_values(CheckpointRow, Checkpoint).where(is_of_them)
        query = query.order_by(CheckpointRow.create_time.desc(), CheckpointRow.checkpoint_id.desc())
        async with self._database.read() as connection:
            return await fetch_all(connection, query, Checkpoint)

    async def run_ids(self, tenant_id: str, *, session_id: str) -> Sequence[str]:
        """Return the ids of the tenant's runs that were made in a session, oldest first."""
        is_it = (RunRow.tenant_id == tenant_id) & (RunRow.session_id == session_id)
        query = select(RunRow.run_id).where(is_it).order_by(RunRow.create_time, RunRow.run_id)
        async with self._database.read() as connection:
            return list((await connection.execute(query)).scalars())

    async def stored(self, tenant_id: str, *, session_id: str = '', project_id: str = '') -> tuple[int, int]:
        """Return number and bytes of the tenant's checkpoints, or of those of a session's or a project's runs."""
        is_it = _is_kept(tenant_id)
        of_runs = select(RunRow.run_id).where(RunRow.tenant_id == tenant_id)
        if session_id:
            is_it &= CheckpointRow.run_id.in_(of_runs.where(RunRow.session_id == session_id))
        if project_id:
            of_project = RunRow.session_id.in_(_sessions_of(tenant_id, project_id))
            is_it &= CheckpointRow.run_id.in_(of_runs.where(of_project))
        query = select(func.count(), func.coalesce(func.sum(CheckpointRow.size_bytes), 0)).where(is_it)
        async with self._database.read() as connection:
            count, size_bytes = (await connection.execute(query)).one()
            return int(count), int(size_bytes)

    async def _some(
        self,
        value_class: type[Item],
        row_class: type[Base],
        is_it: ColumnElement[bool],
        *,
        order: tuple[InstrumentedAttribute[Any], ...],
        part: Slice,
    ) -> Counted[Item]:
        query = select_values(row_class, value_class).where(is_it).order_by(*(column.desc() for column in order))
        async with self._database.read() as connection:
            items = await fetch_all(connection, query.offset(part.offset).limit(part.limit), value_class)
            count = (await connection.execute(select(func.count()).select_from(row_class).where(is_it))).scalar_one()
            return Counted(items, count)


def _is_kept(tenant_id: str) -> ColumnElement[bool]:
    return (CheckpointRow.tenant_id == tenant_id) & CheckpointRow.delete_time.is_(None)


def _sessions_of(tenant_id: str, project_id: str) -> Select[str]:
    is_it = (SessionRow.tenant_id == tenant_id) & (SessionRow.project_id == project_id)
    return select(SessionRow.session_id).where(is_it)
