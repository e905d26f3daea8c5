"""Tables and store of rollouts."""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import structlog
from sqlalchemy import ColumnElement, Index, LargeBinary, String, and_, delete, func, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapped, mapped_column

from twinkle_services.gateway.catalogue.rules import EntryKey
from twinkle_services.gateway.catalogue.sql import SqlEndedRunRows, is_of_run, key_of, locked_counts
from twinkle_services.gateway.errors import RolloutsTooLarge, RunDataDamaged
from twinkle_services.gateway.rollouts.packing import (
    DamagedGroup,
    PackedGroup,
    content_of,
    merge_all,
    pack_all,
    unpack_summaries,
)
from twinkle_services.gateway.rollouts.rules import (
    LISTED_BYTES,
    MAX_CHANGED_BYTES,
    GroupKey,
    Groups,
    GroupSummary,
    RolloutFilter,
    RolloutPage,
    StoredRollout,
)
from twinkle_services.gateway.store.base import DELETED_AT_ONCE, Base, SqlStore, as_row, insert_into
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.worker import Threads

_log = structlog.get_logger('rollouts')
_WRITERS = 2
"""Maximum number of transactions that store rollouts at the same time. Others wait without a database connection."""
_COUNTS = ('stored_bytes', 'write_number', 'removed_group_count')


class RolloutRunRow(Base):
    """Table of runs with rollouts. Every change of a run's rollouts locks its row."""

    __tablename__ = 'rollout_runs'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    stored_bytes: Mapped[int]
    write_number: Mapped[int]
    """Number of changes of the run's rollouts."""
    removed_group_count: Mapped[int]
    update_time: Mapped[datetime]


class RolloutGroupRow(Base):
    """Table of groups of rollouts, see `rollouts.packing`."""

    __tablename__ = 'rollout_groups'
    __table_args__ = (Index('ix_rollout_groups_written', 'tenant_id', 'run_id', 'write_number'),)
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    group_id: Mapped[str] = mapped_column(
        String(128).with_variant(String(128, collation='C'), 'postgresql'), primary_key=True
    )
    write_number: Mapped[int]
    """Number of the last change of the group."""
    size_bytes: Mapped[int]
    """Number of bytes that count for the limit of the run."""
    summary_bytes: Mapped[int]
    content_bytes: Mapped[int]
    update_time: Mapped[datetime]
    summaries: Mapped[bytes] = mapped_column(LargeBinary)
    content: Mapped[bytes] = mapped_column(LargeBinary)


class SqlRolloutStore(SqlStore):
    """Stores the rollouts of runs by step, group and index. `close` stops its threads."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._writers = asyncio.Semaphore(_WRITERS)
        # Transactions must not wait for threads that other work occupies.
        self._packing, self._merging = Threads('rollouts-packing', count=1), Threads('rollouts-merging', count=_WRITERS)
        self._reading = Threads('rollouts-reading', count=1)

    async def save(self, run: EntryKey, step: int, groups: Groups, *, moment: datetime, max_bytes: int) -> int:
        """Store rollouts of one step, and return the number of removed groups.

        A rollout with the step, group and index of a stored one replaces it. If the run would have more than
        `max_bytes` stored bytes (compressed, and a constant for each group), groups are removed in the order of their
        last change; groups of the same call are removed in the order of their ids.

        Raises:
            RolloutsTooLarge: the changed groups have more than `max_bytes`, or more than `MAX_CHANGED_BYTES` before
                compression; nothing is stored.
            RunDataDamaged: a stored group that would change is damaged; nothing is stored.
        """
        changed = await self._packing.run(pack_all, groups)
        async with self._writers, self._database.write() as connection:
            counts = await locked_counts(connection, RolloutRunRow, run, _COUNTS, moment=moment)
            await _check_change(connection, run, step, changed)
            stored = await _stored(connection, run, step, changed)
            if stored:
                with _named_damage(run[1]):
                    changed |= await self._merging.run(merge_all, stored, groups)
            size_bytes = sum(group.size_bytes for group in changed.values())
            if size_bytes > max_bytes:
                raise RolloutsTooLarge('rollout_bytes_per_run', max_bytes)
            counts['write_number'] += 1
            counts['stored_bytes'] += size_bytes - sum(group.size_bytes for group in stored.values())
            common = {**key_of(run), 'step': step, 'write_number': counts['write_number'], 'update_time': moment}
            await _write(connection, common, changed)
            removed = await _remove_oldest(connection, run, counts, excess=counts['stored_bytes'] - max_bytes)
            is_run = is_of_run(RolloutRunRow, run)
            await connection.execute(update(RolloutRunRow).where(is_run).values(**counts, update_time=moment))
        return removed

    async def list_page(
        self, run: EntryKey, wanted: RolloutFilter, *, size: int, after: GroupKey | None
    ) -> RolloutPage:
        """Return at most `size` groups that follow `after`, or the first groups; fewer if the groups are large.

        Groups are ordered by step as `wanted` requests, and by id within a step.

        Raises:
            RunDataDamaged: the summaries of one of the groups are damaged.
        """
        row = RolloutGroupRow
        conditions = [is_of_run(row, run), *_conditions(wanted)]
        if after is not None:
            is_later_listed = row.step > after[0] if wanted.is_ascending else row.step < after[0]
            conditions.append(or_(is_later_listed, and_(row.step == after[0], row.group_id > after[1])))
        columns = (row.step, row.group_id, row.update_time, row.summary_bytes, row.summaries)
        order = row.step.asc() if wanted.is_ascending else row.step.desc()
        query = select(*columns).where(*conditions).order_by(order, row.group_id).limit(size + 1)
        removed = select(RolloutRunRow.removed_group_count).where(is_of_run(RolloutRunRow, run))
        async with self._database.read() as connection:
            found: Sequence[Any] = (await connection.execute(query)).all()
            removed_count = await connection.scalar(removed)
        with _named_damage(run[1]):
            return await self._reading.run(_page_of, found, size=size, removed_group_count=removed_count or 0)

    async def get(self, run: EntryKey, group: GroupKey, index: int) -> StoredRollout | None:
        """Return a rollout, or None if it does not exist.

        Raises:
            RunDataDamaged: the group is damaged.
        """
        row = RolloutGroupRow
        is_group = is_of_run(row, run) & (row.step == group[0]) & (row.group_id == group[1])
        query = select(row.summaries, row.content, row.update_time).where(is_group)
        async with self._database.read() as connection:
            found: Any = (await connection.execute(query)).one_or_none()
        if found is None:
            return None
        with _named_damage(run[1]):
            content = await self._reading.run(content_of, bytes(found.summaries), bytes(found.content), index)
        if content is None:
            return None
        return StoredRollout(step=group[0], group_id=group[1], content=content, update_time=found.update_time)

    def close(self) -> None:
        for threads in (self._packing, self._merging, self._reading):
            threads.close()


class SqlEndedRollouts(SqlEndedRunRows):
    """Implements `EndedRows` for the rollouts of runs that are no longer listed."""

    run_row = RolloutRunRow
    content_row = RolloutGroupRow


@contextmanager
def _named_damage(run_id: str) -> Iterator[None]:
    """Convert the error of a damaged group to the error of its run."""
    try:
        yield
    except DamagedGroup as error:
        _log.warning('rollouts damaged', run=run_id, exc_info=error)
        raise RunDataDamaged(run_id, 'rollouts') from error


def _conditions(wanted: RolloutFilter) -> list[ColumnElement[bool]]:
    row = RolloutGroupRow
    conditions = [row.step >= wanted.begin_step]
    if wanted.end_step is not None:
        conditions.append(row.step < wanted.end_step)
    if wanted.group_id:
        conditions.append(row.group_id == wanted.group_id)
    return conditions


async def _check_change(connection: AsyncConnection, run: EntryKey, step: int, new: Mapping[str, PackedGroup]) -> None:
    """Check the size of the groups that a change reads and writes while it holds the lock of the run.

    Raises:
        RolloutsTooLarge: the stored groups and the new ones have too many bytes before compression.
    """
    row = RolloutGroupRow
    query = select(func.sum(row.summary_bytes + row.content_bytes)).where(_is_changed(run, step, new))
    size_bytes = int(await connection.scalar(query) or 0)
    size_bytes += sum(group.summary_bytes + group.content_bytes for group in new.values())
    if size_bytes > MAX_CHANGED_BYTES:
        raise RolloutsTooLarge('rollout_bytes_per_request', MAX_CHANGED_BYTES)


async def _stored(
    connection: AsyncConnection, run: EntryKey, step: int, group_ids: Collection[str]
) -> dict[str, PackedGroup]:
    """Return the stored groups among `group_ids`."""
    row = RolloutGroupRow
    columns = (row.group_id, row.summaries, row.content, row.summary_bytes, row.content_bytes)
    found: Sequence[Any] = (await connection.execute(select(*columns).where(_is_changed(run, step, group_ids)))).all()
    return {
        group_id: PackedGroup(bytes(summaries), bytes(content), *sizes)
        for group_id, summaries, content, *sizes in found
    }


def _is_changed(run: EntryKey, step: int, group_ids: Collection[str]) -> ColumnElement[bool]:
    row = RolloutGroupRow
    return is_of_run(row, run) & (row.step == step) & row.group_id.in_(group_ids)


async def _write(connection: AsyncConnection, common: Mapping[str, Any], changed: Mapping[str, PackedGroup]) -> None:
    rows = [
        {**common, 'group_id': group_id, 'size_bytes': group.size_bytes, **as_row(group)}
        for group_id, group in sorted(changed.items())
    ]
    insert = insert_into(connection, RolloutGroupRow)
    index = ['tenant_id', 'run_id', 'step', 'group_id']
    values = {name: insert.excluded[name] for name in rows[0] if name not in index}
    await connection.execute(insert.on_conflict_do_update(index_elements=index, set_=values), rows)


async def _remove_oldest(connection: AsyncConnection, run: EntryKey, counts: dict[str, int], *, excess: int) -> int:
    """Remove groups in the order of their last change until `excess` bytes are free, and count them in `counts`."""
    row = RolloutGroupRow
    # Groups of the last change fit into the limit, so they stay.
    is_older = is_of_run(row, run) & (row.write_number < counts['write_number'])
    order = (row.write_number, row.step, row.group_id)
    query = select(row.step, row.group_id, row.size_bytes).where(is_older).order_by(*order).limit(DELETED_AT_ONCE)
    freed, removed, is_last = 0, 0, False
    while freed < excess and not is_last:
        found: Sequence[Any] = (await connection.execute(query)).all()
        chosen: list[GroupKey] = []
        for step, group_id, size_bytes in found:
            if freed >= excess:
                break
            chosen.append((step, group_id))
            freed += size_bytes
        is_chosen = is_of_run(row, run) & tuple_(row.step, row.group_id).in_(chosen)
        await connection.execute(delete(row).where(is_chosen))
        removed, is_last = removed + len(chosen), len(found) < DELETED_AT_ONCE
    counts['stored_bytes'] -= freed
    counts['removed_group_count'] += removed
    return removed


def _page_of(rows: Sequence[Any], *, size: int, removed_group_count: int) -> RolloutPage:
    """Return the first groups as a page, which ends with the group that reaches `LISTED_BYTES`."""
    listed_bytes = 0
    groups: list[GroupSummary] = []
    for row in rows[:size]:
        rollouts = unpack_summaries(bytes(row.summaries))
        groups.append(
            GroupSummary(step=row.step, group_id=row.group_id, rollouts=rollouts, update_time=row.update_time)
        )
        listed_bytes += row.summary_bytes
        if listed_bytes >= LISTED_BYTES:
            break
    next_key = (groups[-1].step, groups[-1].group_id) if len(rows) > len(groups) else None
    return RolloutPage(groups=groups, next_key=next_key, removed_group_count=removed_group_count)
