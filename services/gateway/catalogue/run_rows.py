"""Rows that features store with a run, such as its metrics: the lock of a run, and removal after its end."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import ColumnElement, delete, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from twinkle_services.gateway.catalogue.rules import EntryKey
from twinkle_services.gateway.catalogue.sql import RunRow
from twinkle_services.gateway.store.base import SqlStore, insert_into


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
