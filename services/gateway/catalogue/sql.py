"""The catalogue's copies of runs and checkpoints in SQL. Rows are marked, never removed."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Index, false, select, update
from sqlalchemy.orm import Mapped, mapped_column

from services.gateway.catalogue.rules import Checkpoint, CheckpointFilter, EntryKey, Run, RunFilter
from services.gateway.paging import Page
from services.gateway.store.base import Base
from services.gateway.store.database import Database
from services.gateway.store.statements import (
    as_row,
    fetch_all,
    fetch_one,
    has_label,
    insert_into,
    newest_first,
    select_values,
)


class RunRow(Base):
    """Runs as last reported by the model services, which may name tenants that the gateway does not know."""

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
    """Checkpoints as last reported by the checkpoint service."""

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
    """When the checkpoint was found deleted; None while it exists."""


class SqlRunStore:
    """Keeps runs. A run that is gone stays listed, inactive."""

    def __init__(self, database: Database) -> None:
        """Keep them in `database`."""
        self._database = database

    async def save(self, entry: Run) -> None:
        """Keep the run as it is now."""
        row = as_row(entry)
        async with self._database.write() as connection:
            insert = insert_into(connection, RunRow).values(row)
            await connection.execute(insert.on_conflict_do_update(index_elements=['tenant_id', 'run_id'], set_=row))

    async def mark_gone(self, key: EntryKey, *, moment: datetime) -> None:
        """Mark one run inactive; an unknown one is no error."""
        is_it = _is_run(key) & RunRow.is_active
        async with self._database.write() as connection:
            await connection.execute(update(RunRow).where(is_it).values(is_active=False, update_time=moment))

    async def mark_absent_gone(
        self, present: Collection[EntryKey], *, moment: datetime, base_models: Collection[str] | None = None
    ) -> None:
        """Mark every run inactive whose key is not in `present`, of `base_models` alone unless it is None."""
        query = select(RunRow.tenant_id, RunRow.run_id).where(RunRow.is_active)
        if base_models is not None:
            query = query.where(RunRow.base_model.in_(base_models))
        async with self._database.write() as connection:
            active = await connection.execute(query)
            for key in {(row.tenant_id, row.run_id) for row in active} - set(present):
                statement = update(RunRow).where(_is_run(key))
                await connection.execute(statement.values(is_active=False, update_time=moment))

    async def get(self, tenant_id: str, run_id: str) -> Run | None:
        """Return the tenant's run, or None."""
        is_it = (RunRow.tenant_id == tenant_id) & (RunRow.run_id == run_id)
        async with self._database.read() as connection:
            return await fetch_one(connection, select_values(RunRow, Run).where(is_it), Run)

    async def list_newest(self, tenant_id: str, page: Page, wanted: RunFilter) -> Sequence[Run]:
        """Return one item more than the page where there are as many, newest first."""
        query = select_values(RunRow, Run).where(RunRow.tenant_id == tenant_id)
        for condition in _run_conditions(wanted, self._database.dialect):
            query = query.where(condition)
        query = newest_first(query, page, time=RunRow.create_time, item_id=RunRow.run_id)
        async with self._database.read() as connection:
            return await fetch_all(connection, query, Run)


class SqlCheckpointStore:
    """Keeps checkpoints. One that is gone is listed no more; its row stays."""

    def __init__(self, database: Database) -> None:
        """Keep them in `database`."""
        self._database = database

    async def save(self, entry: Checkpoint) -> None:
        """Keep the checkpoint as it is now; it is there, whatever was marked before."""
        row = {**as_row(entry), 'delete_time': None}
        async with self._database.write() as connection:
            insert = insert_into(connection, CheckpointRow).values(row)
            await connection.execute(
                insert.on_conflict_do_update(index_elements=['tenant_id', 'checkpoint_id'], set_=row)
            )

    async def mark_gone(self, key: EntryKey, *, moment: datetime) -> None:
        """Mark one checkpoint as gone; an unknown one is no error."""
        is_it = _is_checkpoint(key) & CheckpointRow.delete_time.is_(None)
        async with self._database.write() as connection:
            await connection.execute(update(CheckpointRow).where(is_it).values(delete_time=moment))

    async def mark_absent_gone(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        """Mark every checkpoint as gone whose key is not in `present`."""
        is_there = CheckpointRow.delete_time.is_(None)
        async with self._database.write() as connection:
            query = select(CheckpointRow.tenant_id, CheckpointRow.checkpoint_id).where(is_there)
            kept = await connection.execute(query)
            for key in {(row.tenant_id, row.checkpoint_id) for row in kept} - set(present):
                statement = update(CheckpointRow).where(_is_checkpoint(key))
                await connection.execute(statement.values(delete_time=moment))

    async def list_newest(self, tenant_id: str, page: Page, wanted: CheckpointFilter) -> Sequence[Checkpoint]:
        """Return one item more than the page where there are as many, newest first."""
        is_there = (CheckpointRow.tenant_id == tenant_id) & CheckpointRow.delete_time.is_(None)
        query = select_values(CheckpointRow, Checkpoint).where(is_there)
        for condition in _checkpoint_conditions(wanted, self._database.dialect):
            query = query.where(condition)
        query = newest_first(query, page, time=CheckpointRow.create_time, item_id=CheckpointRow.checkpoint_id)
        async with self._database.read() as connection:
            return await fetch_all(connection, query, Checkpoint)


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
