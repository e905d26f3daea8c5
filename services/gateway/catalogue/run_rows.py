"""Removes rows that belong to runs which are no longer listed, such as metrics."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import ColumnElement, delete, select, tuple_

from services.gateway.catalogue.sql import RunRow
from services.gateway.store.base import SqlStore


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
        return sum([await self._purge_run(*key, before=before) for key in ended])

    async def _purge_run(self, tenant_id: str, run_id: str, *, before: datetime) -> int:
        """Delete the rows of a run, unless they were changed since `before`; return the number of rows."""
        is_run, is_content = (_is_of_run(row, tenant_id, run_id) for row in (self.run_row, self.content_row))
        locked = select(self.run_row.update_time).where(is_run).with_for_update()
        async with self._database.write() as connection:
            changed = await connection.scalar(locked)
            if changed is None or changed >= before:
                return 0
            count = (await connection.execute(delete(self.content_row).where(is_content))).rowcount
            return count + (await connection.execute(delete(self.run_row).where(is_run))).rowcount


def _is_of_run(row: Any, tenant_id: str, run_id: str) -> ColumnElement[bool]:
    return (row.tenant_id == tenant_id) & (row.run_id == run_id)
