"""The catalogue's copies of runs and checkpoints in SQL. Rows are marked, never removed."""

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import select, update

from services.gateway.backends.sql.database import Database
from services.gateway.backends.sql.statements import (
    as_row,
    fetch_all,
    fetch_one,
    insert_into,
    newest_first,
    select_values,
)
from services.gateway.backends.sql.tables import CheckpointRow, RunRow
from services.gateway.domain.catalogue import Checkpoint, Run
from services.gateway.domain.listing import Page


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
            await connection.execute(insert.on_conflict_do_update(index_elements=['run_id'], set_=row))

    async def mark_gone(self, entry_id: str, *, moment: datetime) -> None:
        """Mark one run inactive; an unknown one is no error."""
        is_it = (RunRow.run_id == entry_id) & RunRow.is_active
        async with self._database.write() as connection:
            await connection.execute(update(RunRow).where(is_it).values(is_active=False, update_time=moment))

    async def mark_absent_gone(self, present: Collection[str], *, moment: datetime) -> None:
        """Mark every run inactive whose id is not in `present`."""
        async with self._database.write() as connection:
            active = (await connection.execute(select(RunRow.run_id).where(RunRow.is_active))).scalars()
            for run_id in set(active) - set(present):
                statement = update(RunRow).where(RunRow.run_id == run_id)
                await connection.execute(statement.values(is_active=False, update_time=moment))

    async def get(self, tenant_id: str, run_id: str) -> Run | None:
        """Return the tenant's run, or None."""
        is_it = (RunRow.tenant_id == tenant_id) & (RunRow.run_id == run_id)
        async with self._database.read() as connection:
            return await fetch_one(connection, select_values(RunRow, Run).where(is_it), Run)

    async def list_newest(self, tenant_id: str, page: Page, *, base_model: str | None) -> Sequence[Run]:
        """Return one item more than the page where there are as many, newest first."""
        query = select_values(RunRow, Run).where(RunRow.tenant_id == tenant_id)
        if base_model is not None:
            query = query.where(RunRow.base_model == base_model)
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
            await connection.execute(insert.on_conflict_do_update(index_elements=['checkpoint_id'], set_=row))

    async def mark_gone(self, entry_id: str, *, moment: datetime) -> None:
        """Mark one checkpoint as gone; an unknown one is no error."""
        is_it = (CheckpointRow.checkpoint_id == entry_id) & CheckpointRow.delete_time.is_(None)
        async with self._database.write() as connection:
            await connection.execute(update(CheckpointRow).where(is_it).values(delete_time=moment))

    async def mark_absent_gone(self, present: Collection[str], *, moment: datetime) -> None:
        """Mark every checkpoint as gone whose id is not in `present`."""
        is_there = CheckpointRow.delete_time.is_(None)
        async with self._database.write() as connection:
            kept = (await connection.execute(select(CheckpointRow.checkpoint_id).where(is_there))).scalars()
            for checkpoint_id in set(kept) - set(present):
                statement = update(CheckpointRow).where(CheckpointRow.checkpoint_id == checkpoint_id)
                await connection.execute(statement.values(delete_time=moment))

    async def list_newest(self, tenant_id: str, page: Page, *, run_id: str | None) -> Sequence[Checkpoint]:
        """Return one item more than the page where there are as many, newest first."""
        is_there = (CheckpointRow.tenant_id == tenant_id) & CheckpointRow.delete_time.is_(None)
        query = select_values(CheckpointRow, Checkpoint).where(is_there)
        if run_id is not None:
            query = query.where(CheckpointRow.run_id == run_id)
        query = newest_first(query, page, time=CheckpointRow.create_time, item_id=CheckpointRow.checkpoint_id)
        async with self._database.read() as connection:
            return await fetch_all(connection, query, Checkpoint)
