"""Tables and stores of quotas and usage. Several gateways may add work to the same row at the same time."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, cast

from sqlalchemy import ColumnElement, ForeignKey, Select, String, delete, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapped, mapped_column

from twinkle_services.gateway.catalogue.sql import CheckpointRow, RunRow, is_existing_checkpoint
from twinkle_services.gateway.metrics.sql import MetricRunRow
from twinkle_services.gateway.quotas.rules import Quota, Reading, Usage, UsageBatch, Work, hour_of
from twinkle_services.gateway.store.base import DELETED_AT_ONCE, Base, SqlStore, as_row, delete_all, insert_into

_COUNTS = ('trained_token_count', 'sampled_token_count', 'prompt_token_count', 'operation_count', 'prompt_count')
_LIMITS = [field.name for field in fields(Quota)]

Works = dict[tuple[str, str], Work]
"""Work by tenant and run."""


class QuotaRow(Base):
    """Table of the quotas that administrators set; NULL selects the configured default."""

    __tablename__ = 'quotas'
    tenant_id: Mapped[str] = mapped_column(String(64), ForeignKey('tenants.tenant_id'), primary_key=True)
    max_adapters: Mapped[int | None]
    tokens_per_second: Mapped[int | None]
    burst_tokens: Mapped[int | None]
    concurrent_samples: Mapped[int | None]
    stored_bytes: Mapped[int | None]
    weight: Mapped[float | None]
    metric_points: Mapped[int | None]


class SqlQuotaStore(SqlStore):
    """Stores the quotas that administrators set."""

    async def list_all(self) -> Mapping[str, Quota]:
        """Return the quotas of all tenants by id."""
        query = select(QuotaRow.tenant_id, *(getattr(QuotaRow, name) for name in _LIMITS))
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return {tenant_id: Quota(**dict(zip(_LIMITS, limits, strict=True))) for tenant_id, *limits in rows}

    async def put(self, tenant_id: str, quota: Quota) -> None:
        """Store a quota, replacing the tenant's previous one."""
        await self._put(QuotaRow, {'tenant_id': tenant_id, **as_row(quota)})


class UsageRow(Base):
    """Table of usage by tenant, run and hour."""

    __tablename__ = 'usage'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    hour: Mapped[datetime] = mapped_column(primary_key=True)
    trained_token_count: Mapped[int]
    sampled_token_count: Mapped[int]
    prompt_token_count: Mapped[int]
    operation_count: Mapped[int]
    prompt_count: Mapped[int]


class UsageMeterRow(Base):
    """Table of the last recorded reading of each run's meter at the model service."""

    __tablename__ = 'usage_meters'
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(primary_key=True)
    trained_token_count: Mapped[int]
    operation_count: Mapped[int]


class UsageWriterRow(Base):
    """Table of the number of each writer's last batch, so that no batch is recorded twice."""

    __tablename__ = 'usage_writers'
    writer_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int]


class SqlUsageStore(SqlStore):
    """Stores the usage of tenants."""

    async def record(self, batch: UsageBatch) -> None:
        """Record a batch completely and exactly once; the batches of one writer arrive in order.

        A reading counts as its increase over the run's highest earlier reading, from any writer.
        """
        async with self._database.write() as connection:
            if not await _is_first(connection, batch):
                return
            works = {(tenant_id, run_id): work for tenant_id, run_id, work in batch.works}
            # A fixed order of rows prevents deadlocks between gateways.
            for reading in sorted(batch.readings, key=lambda item: (item.tenant_id, item.run_id)):
                await _advance(connection, reading, works)
            for (tenant_id, run_id), work in sorted(works.items()):
                await _add(connection, tenant_id, run_id, work, hour=hour_of(batch.moment))

    async def forget_writer(self, writer_id: str) -> None:
        """Delete a writer's batch number once it will send no more batches."""
        await self._execute(delete(UsageWriterRow).where(UsageWriterRow.writer_id == writer_id))

    async def list_of(self, tenant_id: str, *, begin: datetime | None, end: datetime | None) -> Sequence[Usage]:
        """Return the usage by run in the hours that start at or after `begin` and before `end`; None is no bound."""
        async with self._database.read() as connection:
            rows = (await connection.execute(_work_query(tenant_id, begin, end))).all()
            stored: Sequence[Any] = (await connection.execute(_stored_query(tenant_id))).all()
            logged: Sequence[Any] = (await connection.execute(_points_query(tenant_id))).all()
        works = {run_id: Work(**dict(zip(_COUNTS, map(int, counts), strict=True))) for run_id, *counts in rows}
        sizes: dict[str, int] = {run_id: int(size_bytes) for run_id, size_bytes in stored}
        points: dict[str, int] = {run_id: int(count) for run_id, count in logged}
        return [
            Usage(
                run_id=run_id,
                work=works.get(run_id, Work()),
                stored_bytes=sizes.get(run_id, 0),
                metric_point_count=points.get(run_id, 0),
            )
            for run_id in sorted({*works, *sizes, *points})
        ]

    async def stored_bytes(self, tenant_id: str) -> int:
        """Return the total size in bytes of the tenant's checkpoints."""
        query = select(func.sum(CheckpointRow.size_bytes)).where(is_existing_checkpoint(tenant_id))
        async with self._database.read() as connection:
            return int(await connection.scalar(query) or 0)


class SqlEndedUsage(SqlStore):
    """Implements `EndedRows` for usage. Old usage of deleted runs moves to rows that name the tenant but no run.

    The totals of a tenant stay the same for every period. Meters that are no longer needed are deleted.
    """

    async def purge(self, *, before: datetime) -> int:
        count, is_last, runs = 0, False, select(RunRow.run_id)
        while not is_last:
            merged = await self._merge(UsageRow.run_id.not_in(runs) & (UsageRow.hour < before))
            count, is_last = count + merged, merged < DELETED_AT_ONCE
        # The meter of a run that has usage, or that the catalogue lists, is needed to count its next reading.
        meter, used = UsageMeterRow, select(UsageRow.tenant_id, UsageRow.run_id)
        is_unused = meter.run_id.not_in(runs) & tuple_(meter.tenant_id, meter.run_id).not_in(used)
        return count + await delete_all(self._database, meter, is_unused)

    async def _merge(self, is_old: ColumnElement[bool]) -> int:
        """Merge at most `DELETED_AT_ONCE` rows of runs in one transaction, hour by hour, and return their number."""
        row, works = UsageRow, dict[tuple[str, datetime], Work]()
        key = (row.tenant_id, row.run_id, row.hour)
        part = tuple_(*key).in_(select(*key).where(row.run_id != '', is_old).limit(DELETED_AT_ONCE))
        columns = (row.tenant_id, row.hour, *(getattr(row, name) for name in _COUNTS))
        async with self._database.write() as connection:
            deleted = (await connection.execute(delete(row).where(part).returning(*columns))).all()
            for tenant_id, hour, *counts in deleted:
                work = Work(**dict(zip(_COUNTS, counts, strict=True)))
                works[tenant_id, hour] = works.get((tenant_id, hour), Work()) + work
            for (tenant_id, hour), work in sorted(works.items(), key=lambda item: item[0]):
                await _add(connection, tenant_id, '', work, hour=hour)
        return len(deleted)


async def _is_first(connection: AsyncConnection, batch: UsageBatch) -> bool:
    """Record a batch's number; return False if the batch was recorded before."""
    row = {'writer_id': batch.writer_id, 'number': batch.number}
    insert = insert_into(connection, UsageWriterRow).values(row)
    insert = insert.on_conflict_do_update(
        index_elements=['writer_id'], set_=row, where=UsageWriterRow.number < batch.number
    )
    previous = await connection.execute(insert.returning(UsageWriterRow.number))
    return previous.scalar_one_or_none() is not None


async def _advance(connection: AsyncConnection, reading: Reading, works: Works) -> None:
    """Advance a run's meter, and add the increase to `works`."""
    key = {'tenant_id': reading.tenant_id, 'run_id': reading.run_id}
    insert = insert_into(connection, UsageMeterRow).values({**key, 'trained_token_count': 0, 'operation_count': 0})
    await connection.execute(insert.on_conflict_do_nothing(index_elements=list(key)))
    is_meter = (UsageMeterRow.tenant_id == reading.tenant_id) & (UsageMeterRow.run_id == reading.run_id)
    columns = (UsageMeterRow.trained_token_count, UsageMeterRow.operation_count)
    tokens, operations = (await connection.execute(select(*columns).where(is_meter).with_for_update())).one()
    trained, consumed = max(tokens, reading.trained_token_count), max(operations, reading.operation_count)
    increase = Work(trained_token_count=trained - tokens, operation_count=consumed - operations)
    if increase == Work():
        return
    columns_increased = {'trained_token_count': trained, 'operation_count': consumed}
    await connection.execute(update(UsageMeterRow).where(is_meter).values(columns_increased))
    works[reading.tenant_id, reading.run_id] = works.get((reading.tenant_id, reading.run_id), Work()) + increase


async def _add(connection: AsyncConnection, tenant_id: str, run_id: str, work: Work, *, hour: datetime) -> None:
    row = {'tenant_id': tenant_id, 'run_id': run_id, 'hour': hour, **as_row(work)}
    insert = insert_into(connection, UsageRow).values(row)
    sums = {name: getattr(UsageRow, name) + insert.excluded[name] for name in _COUNTS}
    await connection.execute(insert.on_conflict_do_update(index_elements=['tenant_id', 'run_id', 'hour'], set_=sums))


def _work_query(tenant_id: str, begin: datetime | None, end: datetime | None) -> Select[Any]:
    query = select(UsageRow.run_id, *(func.sum(getattr(UsageRow, name)) for name in _COUNTS))
    query = query.where(UsageRow.tenant_id == tenant_id).group_by(UsageRow.run_id)
    if begin is not None:
        query = query.where(UsageRow.hour >= begin)
    return query if end is None else query.where(UsageRow.hour < end)


def _stored_query(tenant_id: str) -> Select[Any]:
    query = select(CheckpointRow.run_id, func.sum(CheckpointRow.size_bytes)).group_by(CheckpointRow.run_id)
    return cast('Select[Any]', query.where(is_existing_checkpoint(tenant_id)))


def _points_query(tenant_id: str) -> Select[Any]:
    row = MetricRunRow
    query = select(row.run_id, row.point_count).where(row.tenant_id == tenant_id, row.point_count > 0)
    return cast('Select[Any]', query)
