"""Tests of the schema that the migrations create, on each database."""

import asyncio
from typing import Any, cast

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

import twinkle_services.gateway.__main__  # noqa: F401 (imports every feature, which registers its tables)
from twinkle_services.gateway.errors import TenantMetricsFull
from twinkle_services.gateway.keys.rules import Tenant
from twinkle_services.gateway.keys.sql import SqlTenantStore
from twinkle_services.gateway.metrics.rules import MetricFilter, Point, PointLimits, Report
from twinkle_services.gateway.metrics.sql import SqlMetricStore
from twinkle_services.gateway.store.base import Base
from twinkle_services.gateway.store.database import Database
from twinkle_services.gateway.store.migrations import SchemaNotSupported
from twinkle_services.kit import sqlite_seals
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import InvalidField


def _differences(connection: Connection) -> list[Any]:
    # Only SQLite databases have the table `row_seals`, and no migration creates this table.
    own = {'include_name': lambda name, kind, parents: kind != 'table' or name != 'row_seals'}
    return compare_metadata(MigrationContext.configure(connection, opts=own), Base.metadata)


async def test_migrated_schema_equals_the_tables(database_url: str) -> None:
    """The schema that the migrations create equals the tables that the features define."""
    database = await Database.open(database_url)
    async with database.read() as connection:
        assert await connection.run_sync(_differences) == []
    await database.close()


async def test_gateways_that_start_at_the_same_time_create_the_schema_once(database_url: str) -> None:
    """Several gateways can open an empty database at the same time, and a reopened database keeps its rows."""
    databases = await asyncio.gather(*(Database.open(database_url) for _ in range(4)))
    tenant = Tenant(tenant_id='alice', display_name='Alice', create_time=FakeClock().now())
    await SqlTenantStore(databases[0]).add_if_absent(tenant)
    for database in databases:
        await database.close()
    reopened = await Database.open(database_url)
    assert await SqlTenantStore(reopened).get('alice') == tenant
    await reopened.close()


async def _set_revision(database: Database, revision: str) -> None:
    async with database.write() as connection:
        await connection.execute(text('UPDATE alembic_version SET version_num = :revision'), {'revision': revision})


def _remove_later_tables(connection: Connection) -> None:
    """Remove the tables that were added after revision r0011, and record this revision."""
    raw = cast(sqlite_seals.DatabaseConnection, connection.connection)
    is_sealed = connection.dialect.name == 'sqlite'
    if is_sealed:
        sqlite_seals.remove(raw)
    for table in ('creations', 'metric_runs', 'metric_chunks', 'rollout_runs', 'rollout_groups', 'metric_tenants'):
        connection.execute(text(f'DROP TABLE {table}'))
    connection.execute(text('ALTER TABLE quotas DROP COLUMN metric_points'))
    connection.execute(text("UPDATE alembic_version SET version_num = 'r0011'"))
    if is_sealed:
        sqlite_seals.install(raw)


async def test_database_of_the_first_release_stays_usable(database_url: str) -> None:
    """A database at revision r0011 is upgraded, and its rows remain readable."""
    database = await Database.open(database_url)
    tenant = Tenant(tenant_id='alice', display_name='Alice', create_time=FakeClock().now())
    await SqlTenantStore(database).add_if_absent(tenant)
    async with database.write() as connection:
        await connection.run_sync(_remove_later_tables)
    await database.close()
    reopened = await Database.open(database_url)
    async with reopened.read() as connection:
        assert await connection.run_sync(_differences) == []
    assert await SqlTenantStore(reopened).get('alice') == tenant
    await reopened.close()


def _remove_report_numbers(connection: Connection) -> None:
    """Remove the column and the tables that were added after revision r0013, and record this revision."""
    raw = cast(sqlite_seals.DatabaseConnection, connection.connection)
    is_sealed = connection.dialect.name == 'sqlite'
    if is_sealed:
        sqlite_seals.remove(raw)
    connection.execute(text('DROP INDEX ix_metric_chunks_revision'))
    columns = ('metric_runs', 'sequence_number'), ('metric_runs', 'revision'), ('metric_chunks', 'revision')
    for table, column in (*columns, ('quotas', 'metric_points')):
        connection.execute(text(f'ALTER TABLE {table} DROP COLUMN {column}'))
    for table in ('rollout_runs', 'rollout_groups', 'metric_tenants'):
        connection.execute(text(f'DROP TABLE {table}'))
    connection.execute(text("UPDATE alembic_version SET version_num = 'r0013'"))
    if is_sealed:
        sqlite_seals.install(raw)


async def test_stored_metrics_stay_after_an_upgrade(database_url: str) -> None:
    """Metrics in a database of revision r0013 are readable and counted, and reports are added to them."""
    database = await Database.open(database_url)
    key, moment = ('alice', 'ad-1'), FakeClock().now()
    await SqlMetricStore(database).save(*key, [Point('x', 0, 1.0)], moment=moment, limits=PointLimits(per_run=10))
    async with database.write() as connection:
        await connection.run_sync(_remove_report_numbers)
    await database.close()
    reopened = await Database.open(database_url)
    store, report = SqlMetricStore(reopened), Report(sequence_number=1, points=[Point('x', 1, 2.0)])
    with pytest.raises(TenantMetricsFull):
        await store.save_reports(*key, [report], moment=moment, limits=PointLimits(per_run=10, per_tenant=1))
    await store.save_reports(*key, [report], moment=moment, limits=PointLimits(per_run=10, per_tenant=2))
    (series,) = await store.list_of(*key, MetricFilter())
    assert series.values == [1.0, 2.0]
    await reopened.close()


@pytest.mark.parametrize('revision', ['r0004', 'r0010', 'r9999'])
async def test_database_of_an_unknown_revision_is_refused(database_url: str, revision: str) -> None:
    """Opening a database with an unknown revision, or a revision before r0011, always raises SchemaNotSupported."""
    database = await Database.open(database_url)
    await _set_revision(database, revision)
    for _ in range(2):
        with pytest.raises(SchemaNotSupported):
            await Database.open(database_url)
    await database.close()


async def test_nul_character_in_a_text_is_refused(database_url: str) -> None:
    """A NUL character in a string raises InvalidField on every database, in reads and in writes."""
    database = await Database.open(database_url)
    tenants = SqlTenantStore(database)
    tenant = Tenant(tenant_id='alice', display_name='A\0', create_time=FakeClock().now())
    for call in (tenants.add_if_absent(tenant), tenants.get('alice\0')):
        with pytest.raises(InvalidField):
            await call
    assert await tenants.get('alice') is None
    await database.close()
