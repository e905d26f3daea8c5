"""The schema that the migrations make, on each database."""

import asyncio
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from services.gateway.backends.sql import Database, SqlTenantStore
from services.gateway.backends.sql.tables import Base
from services.gateway.domain.tenant import Tenant
from services.kit.clock import FakeClock


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
