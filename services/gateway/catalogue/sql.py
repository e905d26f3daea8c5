"""Tables, stores and queries of runs, requests for runs, and checkpoints. Deleted entries are marked, then removed.

`SqlEndedRunRows` and the functions after it are for rows that other features store with a run.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, TypeVar

from sqlalchemy import ColumnElement, Index, Select, delete, false, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute, Mapped, mapped_column

from twinkle_services.gateway.catalogue.rules import Checkpoint, CheckpointFilter, Creation, EntryKey, Run, RunFilter
from twinkle_services.gateway.paging import Counted, Listing, Page, Slice
from twinkle_services.gateway.sessions.rules import Session, SessionState
from twinkle_services.gateway.sessions.sql import SessionRow
from twinkle_services.gateway.store.base import (
    Base,
    SqlStore,
    as_row,
    delete_all,
    fetch_all,
    has_label,
    insert_into,
    select_values,
)

Item = TypeVar('Item')


class RunRow(Base):
    """Table of runs as last reported by the model services; their tenants may be missing in the table of tenants."""

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


class CreationRow(Base):
    """Table of requests for new runs, each with the model service that the request was first assigned to."""

    __tablename__ = 'creations'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    base_model: Mapped[str] = mapped_column(primary_key=True)
    creation_key: Mapped[str] = mapped_column(primary_key=True)
    trainer_id: Mapped[str]


class CheckpointRow(Base):
    """Table of checkpoints as last reported by the checkpoint service."""

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
    """Time at which the gateway recorded the deletion; None while the checkpoint exists."""


class SqlRunStore(SqlStore):
    """Implements `EntryStore` for runs.

    Deleted runs stay listed as inactive for 30 days, or longer if one of their checkpoints exists.
    """

    async def save(self, entry: Run) -> None:
        await self._put(RunRow, as_row(entry))

    async def mark_deleted(self, key: EntryKey, *, moment: datetime) -> None:
        is_active_run = _is_run(key) & RunRow.is_active
        await self._execute(update(RunRow).where(is_active_run).values(is_active=False, update_time=moment))

    async def mark_absent_deleted(
        self, present: Collection[EntryKey], *, moment: datetime, base_models: Collection[str] | None = None
    ) -> None:
        """Mark runs that are not in `present` as inactive, for all base models or only for `base_models`."""
        query = select(RunRow.tenant_id, RunRow.run_id).where(RunRow.is_active)
        if base_models is not None:
            query = query.where(RunRow.base_model.in_(base_models))
        async with self._database.write() as connection:
            active = await connection.execute(query)
            for key in {(row.tenant_id, row.run_id) for row in active} - set(present):
                statement = update(RunRow).where(_is_run(key))
                await connection.execute(statement.values(is_active=False, update_time=moment))

    async def get(self, tenant_id: str, run_id: str) -> Run | None:
        """Return the tenant's run, or None if it is unknown."""
        return await self._fetch_one(select_values(RunRow, Run).where(_is_run((tenant_id, run_id))), Run)

    async def list_newest(self, tenant_id: str, page: Page, wanted: RunFilter) -> Listing[Run]:
        """Return a page, newest first."""
        conditions = _run_conditions(wanted, self._database.dialect)
        query = select_values(RunRow, Run).where(RunRow.tenant_id == tenant_id, *conditions)
        return await self._fetch_page(query, Run, page, order=(RunRow.create_time, RunRow.run_id))


class SqlAssignmentStore(SqlStore):
    """Stores which model service each request for a new run was assigned to. Entries are never removed."""

    async def assign(self, creation: Creation) -> Creation:
        """Store a creation unless one with its tenant, base model and creation key exists; return the stored one."""
        return await self._add_if_absent(CreationRow, creation, key=('tenant_id', 'base_model', 'creation_key'))


class SqlCheckpointStore(SqlStore):
    """Implements `EntryStore` for checkpoints. Deleted checkpoints are not listed."""

    async def save(self, entry: Checkpoint) -> None:
        await self._put(CheckpointRow, {**as_row(entry), 'delete_time': None})

    async def mark_deleted(self, key: EntryKey, *, moment: datetime) -> None:
        is_existing = _is_checkpoint(key) & CheckpointRow.delete_time.is_(None)
        await self._execute(update(CheckpointRow).where(is_existing).values(delete_time=moment))

    async def mark_absent_deleted(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        query = select(CheckpointRow.tenant_id, CheckpointRow.checkpoint_id).where(CheckpointRow.delete_time.is_(None))
        async with self._database.write() as connection:
            existing = await connection.execute(query)
            for key in {(row.tenant_id, row.checkpoint_id) for row in existing} - set(present):
                statement = update(CheckpointRow).where(_is_checkpoint(key))
                await connection.execute(statement.values(delete_time=moment))

    async def list_newest(self, tenant_id: str, page: Page, wanted: CheckpointFilter) -> Listing[Checkpoint]:
        """Return a page, newest first."""
        conditions = _checkpoint_conditions(wanted, self._database.dialect)
        query = select_values(CheckpointRow, Checkpoint).where(is_existing_checkpoint(tenant_id), *conditions)
        order = (CheckpointRow.create_time, CheckpointRow.checkpoint_id)
        return await self._fetch_page(query, Checkpoint, page, order=order)


class SqlEndedRows(SqlStore):
    """Implements `EndedRows` for checkpoints, runs and sessions.

    A run stays stored while one of its checkpoints exists, and a session stays stored while one of its runs is stored.
    These rows are needed to sum the stored bytes of a session or a project.
    """

    async def purge(self, *, before: datetime) -> int:
        saved = select(CheckpointRow.tenant_id, CheckpointRow.run_id).where(CheckpointRow.delete_time.is_(None))
        is_old_run = RunRow.is_active.is_(False) & (RunRow.update_time < before)
        is_old_run &= tuple_(RunRow.tenant_id, RunRow.run_id).not_in(saved)
        runs = select(RunRow.tenant_id, RunRow.session_id)
        is_old_session = (SessionRow.state != SessionState.ACTIVE) & SessionRow.is_settled
        is_old_session &= SessionRow.heartbeat_time < before
        is_old_session &= tuple_(SessionRow.tenant_id, SessionRow.session_id).not_in(runs)
        count = await delete_all(self._database, CheckpointRow, CheckpointRow.delete_time < before)
        count += await delete_all(self._database, RunRow, is_old_run)
        return count + await delete_all(self._database, SessionRow, is_old_session)


def _is_run(key: EntryKey) -> ColumnElement[bool]:
    return (RunRow.tenant_id == key[0]) & (RunRow.run_id == key[1])


def _is_checkpoint(key: EntryKey) -> ColumnElement[bool]:
    return (CheckpointRow.tenant_id == key[0]) & (CheckpointRow.checkpoint_id == key[1])


def _run_conditions(wanted: RunFilter, dialect: str) -> Iterator[ColumnElement[bool]]:
    if wanted.base_model is not None:
        yield RunRow.base_model == wanted.base_model
    if wanted.session_id is not None:
        yield RunRow.session_id == wanted.session_id
    if wanted.is_active is not None:
        yield RunRow.is_active.is_(wanted.is_active)
    if wanted.is_published is not None:
        yield RunRow.version > 0 if wanted.is_published else RunRow.version == 0
    for label in wanted.user_metadata.items():
        yield has_label(RunRow.user_metadata, label, dialect)


def _checkpoint_conditions(wanted: CheckpointFilter, dialect: str) -> Iterator[ColumnElement[bool]]:
    row = CheckpointRow
    if wanted.run_id is not None:
        yield row.run_id == wanted.run_id
    if wanted.base_model is not None:
        yield row.base_model == wanted.base_model
    if wanted.is_optimizer_included is not None:
        yield row.is_optimizer_included.is_(wanted.is_optimizer_included)
    if wanted.is_public is not None:
        yield row.is_public.is_(wanted.is_public)
    if wanted.begin_time is not None:
        yield row.create_time >= wanted.begin_time
    if wanted.end_time is not None:
        yield row.create_time < wanted.end_time
    for label in wanted.user_metadata.items():
        yield has_label(row.user_metadata, label, dialect)


class SqlBrowser(SqlStore):
    """Reads the catalogue and the sessions of a tenant, newest first unless a method documents a different order."""

    async def runs(self, tenant_id: str, part: Slice, *, project_id: str = '') -> Counted[Run]:
        """Return a slice of the tenant's runs, limited to one project unless `project_id` is empty."""
        condition = RunRow.tenant_id == tenant_id
        if project_id:
            condition &= RunRow.session_id.in_(_sessions_of(tenant_id, project_id))
        return await self._slice(Run, RunRow, condition, order=(RunRow.create_time, RunRow.run_id), part=part)

    async def checkpoints(self, tenant_id: str, part: Slice) -> Counted[Checkpoint]:
        """Return a slice of the tenant's checkpoints."""
        condition = is_existing_checkpoint(tenant_id)
        order = (CheckpointRow.create_time, CheckpointRow.checkpoint_id)
        return await self._slice(Checkpoint, CheckpointRow, condition, order=order, part=part)

    async def sessions(self, tenant_id: str, part: Slice, *, project_id: str = '') -> Counted[Session]:
        """Return a slice of the tenant's sessions in their stored states, of one project if `project_id` is given."""
        order = (SessionRow.create_time, SessionRow.session_id)
        condition = SessionRow.tenant_id == tenant_id
        if project_id:
            condition &= SessionRow.project_id == project_id
        return await self._slice(Session, SessionRow, condition, order=order, part=part)

    async def checkpoints_of(self, tenant_id: str, run_ids: Collection[str]) -> Sequence[Checkpoint]:
        """Return the checkpoints of some runs, newest first."""
        condition = is_existing_checkpoint(tenant_id) & CheckpointRow.run_id.in_(run_ids)
        order = (CheckpointRow.create_time.desc(), CheckpointRow.checkpoint_id.desc())
        query = select_values(CheckpointRow, Checkpoint).where(condition).order_by(*order)
        return await self._fetch_all(query, Checkpoint)

    async def run_ids(self, tenant_id: str, *, session_id: str) -> Sequence[str]:
        """Return the ids of the runs that a session created, oldest first."""
        condition = (RunRow.tenant_id == tenant_id) & (RunRow.session_id == session_id)
        query = select(RunRow.run_id).where(condition).order_by(RunRow.create_time, RunRow.run_id)
        async with self._database.read() as connection:
            return list((await connection.execute(query)).scalars())

    async def stored(self, tenant_id: str, *, session_id: str = '', project_id: str = '') -> tuple[int, int]:
        """Return the count and total bytes of the tenant's checkpoints, optionally of one session or project."""
        condition = is_existing_checkpoint(tenant_id)
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
            count = await connection.scalar(select(func.count()).select_from(row_class).where(condition))
            return Counted(items, count or 0)


def is_existing_checkpoint(tenant_id: str) -> ColumnElement[bool]:
    """Return the condition for the tenant's checkpoints that are not deleted."""
    return (CheckpointRow.tenant_id == tenant_id) & CheckpointRow.delete_time.is_(None)


def _sessions_of(tenant_id: str, project_id: str) -> Select[str]:
    condition = (SessionRow.tenant_id == tenant_id) & (SessionRow.project_id == project_id)
    return select(SessionRow.session_id).where(condition)


class SqlEndedRunRows(SqlStore):
    """Implements `EndedRows` with one transaction for each run. Subclasses name the tables.

    Both tables have the columns `tenant_id` and `run_id`.
    """

    run_row: ClassVar[Any]
    """Table with a row for each run and the column `update_time`. Every change of a run's rows locks its row."""
    content_row: ClassVar[Any]
    """Table with any number of rows for each run."""

    async def purge(self, *, before: datetime) -> int:
        row, listed = self.run_row, select(RunRow.tenant_id, RunRow.run_id)
        is_ended = tuple_(row.tenant_id, row.run_id).not_in(listed) & (row.update_time < before)
        async with self._database.read() as connection:
            ended: Sequence[Any] = (await connection.execute(select(row.tenant_id, row.run_id).where(is_ended))).all()
        return sum([await self._purge_run((tenant_id, run_id), before=before) for tenant_id, run_id in ended])

    async def _purge_run(self, run: EntryKey, *, before: datetime) -> int:
        """Delete the rows of a run, unless they were changed since `before`; return the number of rows."""
        locked = select(self.run_row.update_time).where(is_of_run(self.run_row, run)).with_for_update()
        async with self._database.write() as connection:
            changed = await connection.scalar(locked)
            if changed is None or changed >= before:
                return 0
            await self.before_removal(connection, run)
            statements = [delete(row).where(is_of_run(row, run)) for row in (self.content_row, self.run_row)]
            return sum([(await connection.execute(statement)).rowcount for statement in statements])

    async def before_removal(self, connection: AsyncConnection, run: EntryKey) -> None:
        """Change other rows in the transaction that removes a run. Does nothing unless a subclass overrides it."""


def key_of(run: EntryKey) -> dict[str, Any]:
    """Return the columns that identify a run."""
    return {'tenant_id': run[0], 'run_id': run[1]}


def is_of_run(row: Any, run: EntryKey) -> ColumnElement[bool]:
    """Return the condition that a row of the table `row` belongs to a run."""
    return (row.tenant_id == run[0]) & (row.run_id == run[1])


async def locked_counts(
    connection: AsyncConnection, row: Any, run: EntryKey, names: Sequence[str], *, moment: datetime
) -> dict[str, int]:
    """Lock the row of a run until the end of the transaction, and return its counts by name.

    `connection` must be in a transaction. The row in the table `row`, see `SqlEndedRunRows.run_row`, is inserted with
    counts of 0 if it does not exist. `names` has the columns of all counts, and `moment` is the time of the change.
    """
    values = {**key_of(run), **dict.fromkeys(names, 0), 'update_time': moment}
    insert = insert_into(connection, row).values(values).on_conflict_do_nothing(index_elements=list(key_of(run)))
    query = select(*(getattr(row, name) for name in names)).where(is_of_run(row, run))
    counts = None
    while counts is None:
        # A purge may delete the row between the two statements.
        await connection.execute(insert)
        counts = (await connection.execute(query.with_for_update())).one_or_none()
    return dict(zip(names, counts, strict=True))
