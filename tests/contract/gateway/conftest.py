"""The implementations of the gateway's stores: in memory, SQLite, and PostgreSQL where there is one."""

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.gateway_stores import (
    MemoryCheckpointStore,
    MemoryKeyStore,
    MemoryRunStore,
    MemorySessionStore,
    MemoryTenantStore,
)
from fixtures.postgres import empty_database, postgres_url
from services.gateway.backends.sql import (
    Database,
    SqlCheckpointStore,
    SqlKeyStore,
    SqlRunStore,
    SqlSessionStore,
    SqlTenantStore,
)
from services.gateway.ports import (
    CheckpointStore,
    KeyStore,
    RunStore,
    SessionStore,
    TenantStore,
)


@dataclass(frozen=True)
class Stores:
    """All stores of one implementation, sharing what they must share."""

    tenants: TenantStore
    keys: KeyStore
    sessions: SessionStore
    runs: RunStore
    checkpoints: CheckpointStore


@pytest.fixture(scope='session')
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL database for these tests alone; without a server it fails in CI, else skips."""
    if url := os.environ.get('TWINKLE_TEST_POSTGRES_URL'):
        yield url
        return
    with postgres_url() as found:
        if found is None:
            end = pytest.fail if os.environ.get('CI') else pytest.skip
            end(
                'PostgreSQL did not run: no server is installed (apt-get install postgresql), '
                'nor does TWINKLE_TEST_POSTGRES_URL name a database to empty'
            )
        yield found


@pytest.fixture
def postgres_database(postgres: str) -> str:
    """URL of a PostgreSQL database without any table."""
    empty_database(postgres)
    return postgres


@pytest.fixture(params=['sqlite', 'postgres'])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without any table."""
    if request.param == 'postgres':
        return request.getfixturevalue('postgres_database')
    return f'sqlite:///{tmp_path / "gateway.db"}'


@pytest.fixture(params=['memory', 'sqlite', 'postgres'])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    """Return empty stores."""
    if request.param == 'memory':
        yield Stores(
            tenants=MemoryTenantStore(),
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
        keys=SqlKeyStore(database),
        sessions=SqlSessionStore(database),
        runs=SqlRunStore(database),
        checkpoints=SqlCheckpointStore(database),
    )
    await database.close()
