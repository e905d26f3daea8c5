"""Tables and store of metrics."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, LargeBinary, String, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapped, mapped_column

from services.gateway.catalogue.sql import RunRow
from services.gateway.errors import MetricsFull
from services.gateway.metrics.chunks import CHUNK_STEPS, ChunkKey, Points, chunks_of, joined, merge_all, reduced
from services.gateway.metrics.rules import MAX_LISTED, MAX_NAMES, MetricFilter, Point, Series
from services.gateway.store.base import Base, SqlStore, delete_all, insert_into

_EPOCH = datetime.fromtimestamp(0, UTC)


class MetricRunRow(Base):
    """Table of runs with metrics. Every change of a run's metrics locks its row."""

    __tablename__ = 'metric_runs'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    point_count: Mapped[int]
    name_count: Mapped[int]
    update_time: Mapped[datetime]


class MetricChunkRow(Base):
    """Table of points in chunks, see `metrics.chunks`."""

    __tablename__ = 'metric_chunks'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    chunk: Mapped[int] = mapped_column(primary_key=True)
    points: Mapped[bytes] = mapped_column(LargeBinary)


class SqlMetricStore(SqlStore):
    """Stores the points of runs."""

    async def save(
        self, tenant_id: str, run_id: str, points: Sequence[Point], *, moment: datetime, max_points: int
    ) -> None:
        """Store points; a point with the name and step of a stored one replaces it, and the last of several counts.

        Raises:
            MetricsFull: the run would have more than `max_points` points or `MAX_NAMES` names; nothing is stored.
        """
        key = {'tenant_id': tenant_id, 'run_id': run_id}
        new = chunks_of(points, (moment - _EPOCH) // timedelta(microseconds=1))
        async with self._database.write() as connection:
            counts = await _locked_counts(connection, key, moment)
            stored, known_names = await _stored(connection, key, new)
            changed = await asyncio.to_thread(merge_all, stored, new)
            counts['point_count'] += sum(map(len, changed.values())) - len(joined(list(stored.values())))
            counts['name_count'] += len({name for name, _ in new} - known_names)
            for quota, limit, count in (
                ('metric_points_per_run', max_points, counts['point_count']),
                ('metric_names_per_run', MAX_NAMES, counts['name_count']),
            ):
                if count > limit:
                    raise MetricsFull(quota, limit)
            rows = [
                {**key, 'name': name, 'chunk': chunk, 'points': data.tobytes()}
                for (name, chunk), data in sorted(changed.items(), key=lambda item: item[0])
            ]
            insert = insert_into(connection, MetricChunkRow)
            replace = insert.on_conflict_do_update(
                index_elements=[*key, 'name', 'chunk'], set_={'points': insert.excluded.points}
            )
            await connection.execute(replace, rows)
            is_run = _is_of_run(MetricRunRow, **key)
            await connection.execute(update(MetricRunRow).where(is_run).values(**counts, update_time=moment))

    async def list_of(self, tenant_id: str, run_id: str, wanted: MetricFilter) -> Sequence[Series]:
        """Return the metrics of a run by name; see `MetricFilter`."""
        row = MetricChunkRow
        condition = _is_of_run(row, tenant_id, run_id) & (row.chunk >= wanted.begin_step // CHUNK_STEPS)
        if wanted.end_step is not None:
            condition &= row.chunk <= wanted.end_step // CHUNK_STEPS
        if wanted.names:
            condition &= row.name.in_(wanted.names)
        query = select(row.name, row.points).where(condition).order_by(row.name, row.chunk)
        async with self._database.read() as connection:
            found: Sequence[Any] = (await connection.execute(query)).all()
        return await asyncio.to_thread(_series_of, found, wanted)


class SqlEndedMetrics(SqlStore):
    """Implements `EndedRows` for the metrics of runs that are no longer listed."""

    async def purge(self, *, before: datetime) -> int:
        row, listed = MetricRunRow, select(RunRow.tenant_id, RunRow.run_id)
        is_ended = tuple_(row.tenant_id, row.run_id).not_in(listed) & (row.update_time < before)
        async with self._database.read() as connection:
            ended: Sequence[Any] = (await connection.execute(select(row.tenant_id, row.run_id).where(is_ended))).all()
        count = 0
        for tenant_id, run_id in ended:
            count += await delete_all(self._database, MetricChunkRow, _is_of_run(MetricChunkRow, tenant_id, run_id))
            count += await delete_all(self._database, row, _is_of_run(row, tenant_id, run_id) & is_ended)
        return count


def _is_of_run(row: type[MetricRunRow | MetricChunkRow], tenant_id: str, run_id: str) -> ColumnElement[bool]:
    return (row.tenant_id == tenant_id) & (row.run_id == run_id)


async def _locked_counts(connection: AsyncConnection, key: Mapping[str, str], moment: datetime) -> dict[str, int]:
    """Lock the row of a run until the end of the transaction, and return its counts."""
    empty = {**key, 'point_count': 0, 'name_count': 0, 'update_time': moment}
    insert = insert_into(connection, MetricRunRow).values(empty)
    await connection.execute(insert.on_conflict_do_nothing(index_elements=list(key)))
    query = select(MetricRunRow.point_count, MetricRunRow.name_count).where(_is_of_run(MetricRunRow, **key))
    point_count, name_count = (await connection.execute(query.with_for_update())).one()
    return {'point_count': point_count, 'name_count': name_count}


async def _stored(
    connection: AsyncConnection, key: Mapping[str, str], new: Mapping[ChunkKey, Points]
) -> tuple[dict[ChunkKey, bytes], set[str]]:
    """Return the stored chunks that `new` changes, and its names that the run already has."""
    row, names = MetricChunkRow, {name for name, _ in new}
    is_run = _is_of_run(row, **key)
    chunks = select(row.name, row.chunk, row.points).where(is_run, tuple_(row.name, row.chunk).in_(list(new)))
    known = select(row.name).where(is_run, row.name.in_(names)).distinct()
    found: Sequence[Any] = (await connection.execute(chunks)).all()
    return (
        {(name, chunk): bytes(points) for name, chunk, points in found},
        set((await connection.execute(known)).scalars()),
    )


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
