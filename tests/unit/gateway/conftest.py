"""An empty database of a gateway for each test."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from twinkle_services.gateway.store.database import Database, sqlite_engine


@pytest.fixture(scope='session')
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SQLite file with the gateway's schema and no rows; read-only."""
    path = tmp_path_factory.mktemp('gateway') / 'empty.db'

    async def create() -> None:
        await (await Database.open(f'sqlite:///{path}')).close()

    asyncio.run(create())
    return path


@pytest.fixture
async def database(empty_database: Path, tmp_path: Path) -> AsyncIterator[Database]:
    """Empty SQLite database. It is a copy, so that no migrations run; copying and opening it take a few milliseconds."""
    path = shutil.copyfile(empty_database, tmp_path / 'gateway.db')
    database = Database(sqlite_engine(make_url(f'sqlite+aiosqlite:///{path}')))
    yield database
    await database.close()
