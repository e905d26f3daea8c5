"""Table and store of metrics."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, String, case, func, or_, select, tuple_
from sqlalchemy.orm import Mapped, mapped_column

from services.gateway.catalogue.sql import RunRow
from services.gateway.metrics.rules import MAX_LISTED, MAX_SERIES, MetricFilter, Point, Series
from services.gateway.store.base import Base, SqlStore, delete_all, insert_into


class MetricRow(Base):
    """Table of points. NULL is NaN, which SQLite cannot store."""

    __tablename__ = 'metric_points'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    record_time: Mapped[datetime]


_COLUMNS = (MetricRow.name, MetricRow.step, MetricRow.value, MetricRow.record_time)


class SqlMetricStore(SqlStore):
    """Stores the points of runs."""

    async def save(self, tenant_id: str, run_id: str, points: Sequence[Point], *, moment: datetime) -> None:
        """Store points; a point with the name and step of a stored one replaces it, and the last of several counts."""
        key = {'tenant_id': tenant_id, 'run_id': run_id}
        last = {(point.name, point.step): point.value for point in points}
        rows = [
            {**key, 'name': name, 'step': step, 'value': _stored(value), 'record_time': moment}
            # A fixed order of rows prevents deadlocks between gateways.
            for (name, step), value in sorted(last.items())
        ]
        async with self._database.write() as connection:
            insert = insert_into(connection, MetricRow).values(rows)
            changed = {'value': insert.excluded.value, 'record_time': insert.excluded.record_time}
            await connection.execute(insert.on_conflict_do_update(index_elements=[*key, 'name', 'step'], set_=changed))

    async def count_with(self, tenant_id: str, run_id: str, points: Sequence[Point]) -> int:
        """Return the number of points that a run has once `points` are stored, too."""
        keys = {(point.name, point.step) for point in points}
        count = select(func.count()).select_from(MetricRow).where(_is_of_run(tenant_id, run_id))
        replaced = count.where(tuple_(MetricRow.name, MetricRow.step).in_(keys))
        async with self._database.read() as connection:
            stored, known = await connection.scalar(count), await connection.scalar(replaced)
        return (stored or 0) + len(keys) - (known or 0)

    async def list_of(self, tenant_id: str, run_id: str, wanted: MetricFilter) -> Sequence[Series]:
        """Return the metrics of a run by name; see `MetricFilter`."""
        condition = _is_of_run(tenant_id, run_id) & (MetricRow.step >= wanted.begin_step)
        if wanted.end_step is not None:
            condition &= MetricRow.step < wanted.end_step
        if wanted.names:
            condition &= MetricRow.name.in_(wanted.names)
        counts = select(MetricRow.name, func.count(), func.min(MetricRow.step), func.max(MetricRow.step))
        async with self._database.read() as connection:
            found: Sequence[Any] = (await connection.execute(counts.where(condition).group_by(MetricRow.name))).all()
            listed = sorted(found)[:MAX_SERIES]
            series = {name: Series(name=name, point_count=count) for name, count, *_ in listed}
            max_points = min(wanted.max_points, MAX_LISTED // max(len(listed), 1))
            long = {name: (first, last) for name, count, first, last in listed if count > max_points}
            for query in _queries(condition & MetricRow.name.in_(series), long, max_points):
                rows: Sequence[Any] = (await connection.execute(query)).all()
                for name, step, value, moment in rows:
                    series[name].steps.append(step)
                    series[name].values.append(math.nan if value is None else value)
                    series[name].times.append(moment)
        return list(series.values())


class SqlEndedMetrics(SqlStore):
    """Implements `EndedRows` for the metrics of runs that are no longer listed."""

    async def purge(self, *, before: datetime) -> int:
        listed = select(RunRow.tenant_id, RunRow.run_id)
        is_ended = tuple_(MetricRow.tenant_id, MetricRow.run_id).not_in(listed) & (MetricRow.record_time < before)
        return await delete_all(self._database, MetricRow, is_ended)


def _stored(value: float) -> float | None:
    # SQLite stores -0.0 as the integer 0, so the sign of zeros is removed in every database.
    return None if math.isnan(value) else value + 0.0


def _is_of_run(tenant_id: str, run_id: str) -> ColumnElement[bool]:
    return (MetricRow.tenant_id == tenant_id) & (MetricRow.run_id == run_id)


def _queries(condition: ColumnElement[bool], long: Mapping[str, tuple[int, int]], max_points: int) -> list[Any]:
    """Return the query for all metrics with few points, and one for each metric that must be reduced."""
    few = select(*_COLUMNS).where(condition, MetricRow.name.not_in(long)).order_by(MetricRow.name, MetricRow.step)
    return [few, *(_reduced(condition & (MetricRow.name == name), *steps, max_points) for name, steps in long.items())]


def _reduced(condition: ColumnElement[bool], first: int, last: int, max_points: int) -> Any:
    """Return the query for the smallest and the largest value of each of `max_points / 2` ranges of steps."""
    row = MetricRow
    part = (row.step - first) // -(-(last - first + 1) // (max_points // 2))
    # NaN is neither the smallest nor the largest value, unless a range has no other.
    is_missing = case((row.value.is_(None), 1), else_=0)
    low, high = (
        func.row_number().over(partition_by=part, order_by=(is_missing, order, row.step))
        for order in (row.value.asc(), row.value.desc())
    )
    numbered = select(*_COLUMNS, low.label('low'), high.label('high')).where(condition).subquery().c
    columns = (numbered.name, numbered.step, numbered.value, numbered.record_time)
    return select(*columns).where(or_(numbered.low == 1, numbered.high == 1)).order_by(numbered.step)
