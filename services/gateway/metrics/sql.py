"""Tables and store of metrics."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import Index, LargeBinary, String, func, select, tuple_, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapped, mapped_column

from twinkle_services.gateway.catalogue.rules import EntryKey
from twinkle_services.gateway.catalogue.sql import RunRow, SqlEndedRunRows, is_of_run, key_of, locked_counts
from twinkle_services.gateway.errors import MetricsFull, RunDataDamaged, StoredRowDamaged, TenantMetricsFull
from twinkle_services.gateway.metrics.chunks import ChunkKey, Points, chunks_of, count_of, joined, merge_all, reduced
from twinkle_services.gateway.metrics.rules import (
    MAX_LISTED,
    MAX_NAMES,
    MetricFilter,
    Point,
    PointLimits,
    Report,
    Series,
    fits,
)
from twinkle_services.gateway.store.base import Base, SqlStore, insert_into
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.worker import Threads

_log = structlog.get_logger('metrics')
_EPOCH = datetime.fromtimestamp(0, UTC)
_WRITERS = 2
"""Maximum number of transactions that store points at the same time. Others wait without a database connection."""
_COUNTS = ('point_count', 'name_count', 'sequence_number', 'revision')
_READERS = 2
"""Maximum number of reads whose rows are in memory at the same time: the points of a run may take 24 MB."""
_RUNS_AT_ONCE = 500
"""Maximum number of runs in one statement."""


class MetricRunRow(Base):
    """Table of runs with metrics. Every change of a run's metrics locks its row."""

    __tablename__ = 'metric_runs'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    point_count: Mapped[int]
    name_count: Mapped[int]
    update_time: Mapped[datetime]
    sequence_number: Mapped[int]
    """Number of the operation of the last stored report; 0 before the first one."""
    revision: Mapped[int]
    """Time of storage of the newest points, see `SqlMetricStore`; 0 before the first ones."""


class MetricChunkRow(Base):
    """Table of points in chunks, see `metrics.chunks`."""

    __tablename__ = 'metric_chunks'
    __table_args__ = (Index('ix_metric_chunks_revision', 'tenant_id', 'run_id', 'revision'),)
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    chunk: Mapped[int] = mapped_column(primary_key=True)
    points: Mapped[bytes] = mapped_column(LargeBinary)
    revision: Mapped[int]
    """The run's revision at the last change of this chunk."""


class MetricTenantRow(Base):
    """Table of the number of points of each tenant. Transactions lock the rows of runs before the tenant's row."""

    __tablename__ = 'metric_tenants'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    point_count: Mapped[int]


class SqlMetricStore(SqlStore):
    """Stores the points of runs.

    Each change of a run's points has a revision: the time of the change in microseconds, or the previous revision plus
    one if that is larger, because clocks of gateways may differ. A reader that has all points up to a revision lacks
    only points with a larger time of storage.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._writers, self._readers = asyncio.Semaphore(_WRITERS), asyncio.Semaphore(_READERS)
        # Transactions must not wait for threads that other work occupies.
        self._merging, self._reading = Threads('metrics-merging', count=_WRITERS), Threads('metrics-reading', count=1)

    async def save(
        self, tenant_id: str, run_id: str, points: Sequence[Point], *, moment: datetime, limits: PointLimits
    ) -> None:
        """Store points; a point replaces a stored or earlier point with the same name and step.

        Raises:
            MetricsFull: the run would exceed `limits`, or have more than `MAX_NAMES` names; nothing is stored.
            TenantMetricsFull: the runs of the tenant would have more points than `limits` allows; nothing is stored.
            RunDataDamaged: the stored points of the run cannot be read; nothing is stored.
        """
        run = tenant_id, run_id
        async with self._locked(run, moment) as (connection, counts):
            await self._add(connection, run, counts, points, moment=moment, limits=limits)

    async def save_reports(
        self, tenant_id: str, run_id: str, reports: Sequence[Report], *, moment: datetime, limits: PointLimits
    ) -> None:
        """Store the points of the reports that follow the last stored report, in one transaction.

        Raises:
            MetricsFull, TenantMetricsFull, RunDataDamaged: see `save`; nothing is stored.
        """
        run = tenant_id, run_id
        async with self._locked(run, moment) as (connection, counts):
            new = [report for report in reports if report.sequence_number > counts['sequence_number']]
            if new:
                counts['sequence_number'] = new[-1].sequence_number
                points = [point for report in new for point in report.points]
                await self._add(connection, run, counts, points, moment=moment, limits=limits)

    @asynccontextmanager
    async def _locked(self, run: EntryKey, moment: datetime) -> AsyncIterator[tuple[AsyncConnection, dict[str, int]]]:
        """Open a transaction that locks the row of a run, and yield it with the counts of the run."""
        with _named_damage(run[1]):
            async with self._writers, self._database.write() as connection:
                yield connection, await locked_counts(connection, MetricRunRow, run, _COUNTS, moment=moment)

    async def _add(
        self,
        connection: AsyncConnection,
        run: EntryKey,
        counts: dict[str, int],
        points: Sequence[Point],
        *,
        moment: datetime,
        limits: PointLimits,
    ) -> None:
        """Add points to a run whose row is locked, and store its new counts."""
        revision = max((moment - _EPOCH) // timedelta(microseconds=1), counts['revision'] + 1)
        names = {point.name for point in points}
        if len(names) > MAX_NAMES:
            # Each name is a parameter of a statement, which may have a limited number of them.
            raise MetricsFull('metric_names_per_run', MAX_NAMES)
        chunks = await _chunks_by_name(connection, run, names)
        new = await self._merging.run(chunks_of, points, chunks, revision)
        stored = await _stored(connection, run, new)
        changed = await self._merging.run(merge_all, stored, new)
        added = {
            'point_count': count_of(changed.values()) - count_of(stored.values()),
            'name_count': len({name for name, _ in new} - chunks.keys()),
        }
        for name, quota, limit in (
            ('point_count', 'metric_points_per_run', limits.per_run),
            ('name_count', 'metric_names_per_run', MAX_NAMES),
        ):
            if added[name] and counts[name] + added[name] > limit:
                raise MetricsFull(quota, limit)
            counts[name] += added[name]
        if changed:
            counts['revision'] = revision
            await _count(connection, run[0], added['point_count'], limit=limits.per_tenant)
            await _write(connection, run, changed, revision=revision)
        is_run = is_of_run(MetricRunRow, run)
        await connection.execute(update(MetricRunRow).where(is_run).values(**counts, update_time=moment))

    async def list_of(self, tenant_id: str, run_id: str, wanted: MetricFilter) -> Sequence[Series]:
        """Return the metrics of a run by name; see `MetricFilter`.

        Raises:
            RunDataDamaged: the stored points of the run cannot be read.
        """
        row = MetricChunkRow
        condition = is_of_run(row, (tenant_id, run_id))
        if wanted.end_step is not None:
            condition &= row.chunk < wanted.end_step
        if wanted.names:
            condition &= row.name.in_(wanted.names)
        query = select(row.name, row.points).where(condition).order_by(row.name, row.chunk)
        async with self._reading_rows(run_id, query) as found:
            return await self._reading.run(_series_of, found, wanted)

    async def revisions_of(self, runs: Collection[EntryKey]) -> Mapping[EntryKey, int]:
        """Return the newest revision of each run; 0 for a run without metrics. Runs that are not listed are absent."""
        row, keys, found = RunRow, sorted(runs), dict[EntryKey, int]()
        is_same = (MetricRunRow.tenant_id == row.tenant_id) & (MetricRunRow.run_id == row.run_id)
        query = select(row.tenant_id, row.run_id, func.coalesce(MetricRunRow.revision, 0))
        query = query.outerjoin(MetricRunRow, is_same)
        for begin in range(0, len(keys), _RUNS_AT_ONCE):
            part = query.where(tuple_(row.tenant_id, row.run_id).in_(keys[begin : begin + _RUNS_AT_ONCE]))
            async with self._database.read() as connection:
                rows: Sequence[Any] = (await connection.execute(part)).all()
            found.update({(tenant_id, run_id): int(revision) for tenant_id, run_id, revision in rows})
        return found

    async def list_changes(
        self, tenant_id: str, run_id: str, wanted: MetricFilter, *, after: int, until: int
    ) -> Sequence[Series] | None:
        """Return the selected points with revisions from `after` + 1 to `until`.

        Points that were replaced after `until` are omitted. Return None if there are too many points for an update.

        Raises:
            RunDataDamaged: the stored points of the run cannot be read.
        """
        row = MetricChunkRow
        condition = is_of_run(row, (tenant_id, run_id)) & (row.revision > after)
        if wanted.names:
            condition &= row.name.in_(wanted.names)
        # One statement, because a chunk may be divided between two statements, and some of its points would be missing.
        query = select(row.name, row.chunk, row.points).where(condition)
        async with self._reading_rows(run_id, query) as found:
            return await self._reading.run(_changes_of, found, wanted, after, until)

    @asynccontextmanager
    async def _reading_rows(self, run_id: str, query: Any) -> AsyncIterator[Sequence[Any]]:
        """Yield the rows with points that a query selects; at most `_READERS` such blocks run at the same time."""
        with _named_damage(run_id):
            async with self._readers:
                async with self._database.read() as connection:
                    found: Sequence[Any] = (await connection.execute(query)).all()
                yield found

    def close(self) -> None:
        """Stop the threads."""
        self._merging.close()
        self._reading.close()


class SqlEndedMetrics(SqlEndedRunRows):
    """Implements `EndedRows` for the metrics of runs that are no longer listed."""

    run_row = MetricRunRow
    content_row = MetricChunkRow

    async def before_removal(self, connection: AsyncConnection, run: EntryKey) -> None:
        """Subtract the number of points of the run from the number of its tenant."""
        count = await connection.scalar(select(MetricRunRow.point_count).where(is_of_run(MetricRunRow, run)))
        await _count(connection, run[0], -(count or 0))


@contextmanager
def _named_damage(run_id: str) -> Iterator[None]:
    """Convert errors that mean that stored points cannot be read, or are not a valid array.

    Raises:
        RunDataDamaged: the stored points of the run cannot be read.
    """
    try:
        yield
    except (ValueError, DBAPIError, StoredRowDamaged) as error:
        _log.warning('metrics damaged', run=run_id, exc_info=error)
        raise RunDataDamaged(run_id, 'metrics') from error


async def _chunks_by_name(connection: AsyncConnection, run: EntryKey, names: Collection[str]) -> dict[str, list[int]]:
    """Return the steps of the stored chunks of some metrics, ascending; metrics without chunks are absent."""
    row = MetricChunkRow
    query = select(row.name, row.chunk).where(is_of_run(row, run), row.name.in_(names))
    rows: Sequence[Any] = (await connection.execute(query)).all()
    found: dict[str, list[int]] = {}
    for name, chunk in rows:
        found.setdefault(name, []).append(chunk)
    return {name: sorted(chunks) for name, chunks in found.items()}


async def _stored(connection: AsyncConnection, run: EntryKey, new: Mapping[ChunkKey, Points]) -> dict[ChunkKey, bytes]:
    """Return the stored chunks that `new` changes."""
    row = MetricChunkRow
    is_changed = is_of_run(row, run) & tuple_(row.name, row.chunk).in_(list(new))
    query = select(row.name, row.chunk, row.points).where(is_changed)
    found: Sequence[Any] = (await connection.execute(query)).all()
    return {(name, chunk): bytes(points) for name, chunk, points in found}


async def _count(connection: AsyncConnection, tenant_id: str, added: int, *, limit: int | None = None) -> None:
    """Add to the number of points of a tenant, whose row stays locked until the end of the transaction.

    Raises:
        TenantMetricsFull: points are added, and the tenant would have more than `limit`.
    """
    if not added:
        return
    insert = insert_into(connection, MetricTenantRow).values(tenant_id=tenant_id, point_count=added)
    total = {'point_count': MetricTenantRow.point_count + added}
    insert = insert.on_conflict_do_update(index_elements=['tenant_id'], set_=total)
    count = await connection.scalar(insert.returning(MetricTenantRow.point_count))
    if limit is not None and added > 0 and limit < (count or 0):
        raise TenantMetricsFull('metric_points', limit)


async def _write(
    connection: AsyncConnection, run: EntryKey, changed: Mapping[ChunkKey, bytes], *, revision: int
) -> None:
    key = {**key_of(run), 'revision': revision}
    rows = [{**key, 'name': name, 'chunk': chunk, 'points': data} for (name, chunk), data in sorted(changed.items())]
    insert = insert_into(connection, MetricChunkRow)
    values = {name: insert.excluded[name] for name in ('points', 'revision')}
    index = ['tenant_id', 'run_id', 'name', 'chunk']
    await connection.execute(insert.on_conflict_do_update(index_elements=index, set_=values), rows)


def _series_of(rows: Sequence[Any], wanted: MetricFilter) -> list[Series]:
    chunks: dict[str, list[bytes]] = {}
    for name, points in rows:
        chunks.setdefault(name, []).append(bytes(points))
    max_points = min(wanted.max_points, MAX_LISTED // max(len(chunks), 1))
    series = [_one_series(name, joined(parts), wanted, max_points) for name, parts in sorted(chunks.items())]
    return [one for one in series if one.point_count]


def _one_series(name: str, points: Points, wanted: MetricFilter, max_points: int) -> Series:
    begin, end = points['step'].searchsorted([wanted.begin_step, wanted.end_step or 0])
    chosen = points[begin : None if wanted.end_step is None else end]
    return _series(name, reduced(chosen, max_points), point_count=len(chosen))


def _changes_of(rows: Sequence[Any], wanted: MetricFilter, after: int, until: int) -> list[Series] | None:
    chunks: dict[str, list[bytes]] = {}
    for name, _, points in sorted(rows, key=lambda row: (row[0], row[1])):
        chunks.setdefault(name, []).append(bytes(points))
    found: list[Series] = []
    for name, parts in chunks.items():
        points = joined(parts)
        times = points['time_us']
        chosen = points[(times > after) & (times <= until) & (points['step'] >= wanted.begin_step)]
        if len(chosen) > wanted.max_points:
            return None
        if len(chosen):
            found.append(_series(name, chosen, point_count=len(chosen)))
    return found if fits(found, wanted) else None


def _series(name: str, points: Points, *, point_count: int) -> Series:
    return Series(
        name=name,
        steps=points['step'].tolist(),
        values=points['value'].tolist(),
        times_us=points['time_us'].tolist(),
        point_count=point_count,
    )
