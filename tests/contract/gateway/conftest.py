"""Fixtures for the implementations of the gateway's stores: in memory, SQLite, and PostgreSQL if it is installed."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.gateway_stores import (
    MemoryCheckpointStore,
    MemoryKeyStore,
    MemoryProjectStore,
    MemoryRunStore,
    MemorySessionStore,
    MemoryTenantStore,
)
from twinkle_services.gateway.catalogue.ports import CheckpointStore, RunStore
from twinkle_services.gateway.catalogue.sql import SqlCheckpointStore, SqlRunStore
from twinkle_services.gateway.keys.ports import KeyStore, ProjectStore, TenantStore
from twinkle_services.gateway.keys.sql import SqlKeyStore, SqlProjectStore, SqlTenantStore
from twinkle_services.gateway.sessions.ports import SessionStore
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.store.database import Database


@dataclass(frozen=True)
class Stores:
    """All stores of one implementation, with one database."""

    tenants: TenantStore
    projects: ProjectStore
    keys: KeyStore
    sessions: SessionStore
    runs: RunStore
    checkpoints: CheckpointStore


@pytest.fixture(params=['sqlite', 'postgres'])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == 'postgres':
        return request.getfixturevalue('postgres_database')
    return f'sqlite:///{tmp_path / "gateway.db"}'


@pytest.fixture(params=['memory', 'sqlite', 'postgres'])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    """Empty stores of one implementation."""
    if request.param == 'memory':
        yield Stores(
            tenants=MemoryTenantStore(),
            projects=MemoryProjectStore(),
            keys=MemoryKeyStore(),
            sessions=MemorySessionStore(),
            runs=MemoryRunStore(),
            checkpoints=MemoryCheckpointStore(),
        )
        return
    is_postgres = request.param == 'postgres'
    url = request.getfixturevalue('postgres_database') if is_postgres else f'sqlite:///{tmp_path / "gateway.db"}'
    database = await Database.open(url)
    yield Stores(
        tenants=SqlTenantStore(database),
        projects=SqlProjectStore(database),
        keys=SqlKeyStore(database),
        sessions=SqlSessionStore(database),
        runs=SqlRunStore(database),
        checkpoints=SqlCheckpointStore(database),
    )
    await database.close()
