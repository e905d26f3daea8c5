"""Tables and store of metrics."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import LargeBinary, String, select, tuple_, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapped, mapped_column

from services.gateway.catalogue.rules import EntryKey
from services.gateway.catalogue.run_rows import SqlEndedRunRows, is_of_run, key_of, locked_counts
from services.gateway.errors import MetricsFull, RunDataDamaged
from services.gateway.metrics.chunks import ChunkKey, Points, chunks_of, count_of, joined, merge_all, reduced
from services.gateway.metrics.rules import MAX_LISTED, MAX_NAMES, MetricFilter, Point, Report, Series
from services.gateway.store.base import Base, SqlStore, insert_into
from services.gateway.store.database import Database
from services.kit.worker import Threads

_log = structlog.get_logger('metrics')
_EPOCH = datetime.fromtimestamp(0, UTC)
_WRITERS = 2
"""Number of transactions that store points at the same time. The others wait without a connection to the database."""
_COUNTS = ('point_count', 'name_count', 'sequence_number')


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


class MetricChunkRow(Base):
    """Table of points in chunks, see `metrics.chunks`."""

    __tablename__ = 'metric_chunks'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    chunk: Mapped[int] = mapped_column(primary_key=True)
    points: Mapped[bytes] = mapped_column(LargeBinary)


class SqlMetricStore(SqlStore):
    """Implements `MetricStore`. `close` stops its threads."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._writers = asyncio.Semaphore(_WRITERS)
        # Transactions must not wait for threads that other work occupies.
        self._merging, self._reading = Threads('metrics-merging', count=_WRITERS), Threads('metrics-reading', count=1)

    async def save(
        self, tenant_id: str, run_id: str, points: Sequence[Point], *, moment: datetime, max_points: int
    ) -> None:
        run = tenant_id, run_id
        async with self._locked(run, moment) as (connection, counts):
            await self._add(connection, run, counts, points, moment=moment, max_points=max_points)

    async def save_reports(
        self, tenant_id: str, run_id: str, reports: Sequence[Report], *, moment: datetime, max_points: int
    ) -> None:
        run = tenant_id, run_id
        async with self._locked(run, moment) as (connection, counts):
            new = [report for report in reports if report.sequence_number > counts['sequence_number']]
            if new:
                counts['sequence_number'] = new[-1].sequence_number
                points = [point for report in new for point in report.points]
                await self._add(connection, run, counts, points, moment=moment, max_points=max_points)

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
        max_points: int,
    ) -> None:
        """Add points to a run whose row is locked, and store its new counts."""
        time_us = (moment - _EPOCH) // timedelta(microseconds=1)
        names = {point.name for point in points}
        if len(names) > MAX_NAMES:
            # Each name is a parameter of a statement, which may have a limited number of them.
            raise MetricsFull('metric_names_per_run', MAX_NAMES)
        chunks = await _chunks_by_name(connection, run, names)
        new = await self._merging.run(chunks_of, points, chunks, time_us)
        stored = await _stored(connection, run, new)
        changed = await self._merging.run(merge_all, stored, new)
        added = {
            'point_count': count_of(changed.values()) - count_of(stored.values()),
            'name_count': len({name for name, _ in new} - chunks.keys()),
        }
        for name, quota, limit in (
            ('point_count', 'metric_points_per_run', max_points),
            ('name_count', 'metric_names_per_run', MAX_NAMES),
        ):
            if added[name] and counts[name] + added[name] > limit:
                raise MetricsFull(quota, limit)
            counts[name] += added[name]
        await _write(connection, run, changed)
        is_run = is_of_run(MetricRunRow, run)
        await connection.execute(update(MetricRunRow).where(is_run).values(**counts, update_time=moment))

    async def list_of(self, tenant_id: str, run_id: str, wanted: MetricFilter) -> Sequence[Series]:
        row = MetricChunkRow
        condition = is_of_run(row, (tenant_id, run_id))
        if wanted.end_step is not None:
            condition &= row.chunk < wanted.end_step
        if wanted.names:
            condition &= row.name.in_(wanted.names)
        query = select(row.name, row.points).where(condition).order_by(row.name, row.chunk)
        with _named_damage(run_id):
            async with self._database.read() as connection:
                found: Sequence[Any] = (await connection.execute(query)).all()
            return await self._reading.run(_series_of, found, wanted)

    def close(self) -> None:
        self._merging.close()
        self._reading.close()


class SqlEndedMetrics(SqlEndedRunRows):
    """Implements `EndedRows` for the metrics of runs that are no longer listed."""

    run_row = MetricRunRow
    content_row = MetricChunkRow


@contextmanager
def _named_damage(run_id: str) -> Iterator[None]:
    """Convert errors of points that the database cannot read, or that are no array.

    Raises:
        RunDataDamaged: the stored points of the run cannot be read.
    """
    try:
        yield
    except (ValueError, DBAPIError) as error:
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


async def _write(connection: AsyncConnection, run: EntryKey, changed: Mapping[ChunkKey, bytes]) -> None:
    key = key_of(run)
    rows = [{**key, 'name': name, 'chunk': chunk, 'points': data} for (name, chunk), data in sorted(changed.items())]
    insert = insert_into(connection, MetricChunkRow)
    index, points = [*key, 'name', 'chunk'], {'points': insert.excluded.points}
    await connection.execute(insert.on_conflict_do_update(index_elements=index, set_=points), rows)


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
    listed = reduced(chosen, max_points)
    return Series(
        name=name,
        steps=listed['step'].tolist(),
        values=listed['value'].tolist(),
        times_us=listed['time_us'].tolist(),
        point_count=len(chosen),
    )
