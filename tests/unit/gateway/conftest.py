"""A database of a gateway for each test."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fixtures.gateway_database import copied_database, prepare
from twinkle_services.gateway.store.database import Database


@pytest.fixture(scope='session')
def prepared_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SQLite file with the tenants alice and bob; read-only."""
    path = tmp_path_factory.mktemp('gateway') / 'gateway.db'
    asyncio.run(prepare(path))
    return path


@pytest.fixture
async def database(prepared_database: Path, tmp_path: Path) -> AsyncIterator[Database]:
    """SQLite database with the tenants alice and bob, and no other rows."""
    async with copied_database(prepared_database, tmp_path) as database:
        yield database
