"""Fixtures for the gateway's stores, on SQLite and PostgreSQL."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from twinkle_services.gateway.catalogue.sql import SqlCheckpointStore, SqlRunStore
from twinkle_services.gateway.keys.sql import SqlKeyStore, SqlProjectStore, SqlTenantStore
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.store.database import Database


@dataclass(frozen=True)
class Stores:
    """Stores with one database."""

    tenants: SqlTenantStore
    projects: SqlProjectStore
    keys: SqlKeyStore
    sessions: SqlSessionStore
    runs: SqlRunStore
    checkpoints: SqlCheckpointStore


@pytest.fixture(params=['sqlite', 'postgres'])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == 'postgres':
        return request.getfixturevalue('postgres_database')
    return f'sqlite:///{tmp_path / "gateway.db"}'


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """Empty database."""
    database = await Database.open(database_url)
    yield database
    await database.close()


@pytest.fixture
def stores(database: Database) -> Stores:
    """Empty stores."""
    return Stores(
        tenants=SqlTenantStore(database),
        projects=SqlProjectStore(database),
        keys=SqlKeyStore(database),
        sessions=SqlSessionStore(database),
        runs=SqlRunStore(database),
        checkpoints=SqlCheckpointStore(database),
    )
