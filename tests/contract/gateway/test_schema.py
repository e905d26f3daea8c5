"""The schema that the migrations make, on each database."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, text

from services.gateway.catalogue.sql import SqlRunStore
from services.gateway.keys.sql_tenants import SqlTenantStore
from services.gateway.keys.tenant import Tenant
from services.gateway.store import migrations
from services.gateway.store.database import Database
from services.gateway.store.tables import Base
from services.kit.clock import FakeClock
from services.kit.errors import InvalidField


def _differences(connection: Connection) -> list[Any]:
    return compare_metadata(MigrationContext.configure(connection), Base.metadata)


async def test_migrations_make_the_tables_that_the_stores_use(database_url: str) -> None:
    """After the migrations, nothing is left that the tables would change."""
    database = await Database.open(database_url)
    async with database.read() as connection:
        assert await connection.run_sync(_differences) == []
    await database.close()


async def test_schema_is_made_once_by_many_at_the_same_time(database_url: str) -> None:
    """Several gateways that start at once on an empty database all come up, and a later one keeps the rows."""
    databases = await asyncio.gather(*(Database.open(database_url) for _ in range(4)))
    tenant = Tenant(tenant_id='alice', display_name='Alice', create_time=FakeClock().now())
    await SqlTenantStore(databases[0]).add_if_absent(tenant)
    for database in databases:
        await database.close()
    again = await Database.open(database_url)
    assert await SqlTenantStore(again).get('alice') == tenant
    await again.close()


def _migrate(database_url: str, revision: str, *statements: str) -> None:
    """Bring an empty database to a revision of old, with rows in it."""
    engine = create_engine(database_url.replace('postgresql:', 'postgresql+psycopg:'))
    config = Config()
    config.set_main_option('script_location', str(Path(migrations.__file__).parent))
    with engine.begin() as connection:
        config.attributes['connection'] = connection
        command.upgrade(config, revision)
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


async def test_runs_outlive_the_change_of_their_keys(database_url: str) -> None:
    """What an older release kept is there, and another tenant may have a run of the same id afterwards."""
    columns = 'run_id, tenant_id, base_model, lora_rank, step_count, version, user_metadata, is_active'
    values = "'ad-1', 'alice', 'tiny', 8, 5, 2, '{\"a\": \"b\"}', {true}"
    moments = "'2026-01-01 00:00:00', '2026-01-01 00:00:00'"
    is_true = 'true' if database_url.startswith('postgresql') else '1'
    row = values.replace('{true}', is_true)
    insert = f'INSERT INTO runs ({columns}, create_time, update_time) VALUES ({row}, {moments})'
    _migrate(database_url, 'r0004', insert.replace(':', r'\:'))
    database = await Database.open(database_url)
    runs = SqlRunStore(database)
    kept = await runs.get('alice', 'ad-1')
    assert kept is not None
    assert (kept.step_count, kept.user_metadata, kept.is_active) == (5, {'a': 'b'}, True)
    theirs = replace(kept, tenant_id='bob', step_count=7)
    await runs.save(theirs)
    assert (await runs.get('alice', 'ad-1'), await runs.get('bob', 'ad-1')) == (kept, theirs)
    await database.close()


async def test_nul_in_a_text_is_the_caller_s_mistake(database_url: str) -> None:
    """PostgreSQL can keep none; on each database it is refused by name, read or written, and nothing is kept."""
    database = await Database.open(database_url)
    tenants = SqlTenantStore(database)
    tenant = Tenant(tenant_id='alice', display_name='A\0', create_time=FakeClock().now())
    for call in (tenants.add_if_absent(tenant), tenants.get('alice\0')):
        with pytest.raises(InvalidField):
            await call
    assert await tenants.get('alice') is None
    await database.close()
