"""Tests that a thousand futures of one tenant use little memory and do not block another tenant."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fixtures.futures import Recorder, running_futures
from twinkle_services.gateway.futures.payloads import PayloadFiles
from twinkle_services.gateway.futures.rules import Bounds
from twinkle_services.gateway.futures.sql import SqlFutureStore
from twinkle_services.gateway.store.database import Database

COUNT = 1000
PAYLOAD_BYTES = 100_000
"""Upper bound of the size of a request. Request N has a quarter of this size for each digit of N."""
MEMORY_BYTES = 30 << 20
"""Limit of the memory growth in bytes: less than half of the total size of the requests."""


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[tuple[Any, Any]]:
    """Empty stores on a real database and files."""
    database = await Database.open(f'sqlite:///{tmp_path / "gateway.db"}')
    payloads = PayloadFiles(tmp_path / 'payloads')
    yield SqlFutureStore(database), payloads
    payloads.close()
    await database.close()


@pytest.mark.slow
async def test_thousand_waiting_futures_use_little_memory(stores: tuple[Any, Any]) -> None:
    """Waiting requests stay on disk, and another tenant's future is among the next to run."""
    async with running_futures(Recorder(), stores=stores, unordered=Bounds(per_tenant=4, total=6)) as gateway:
        await gateway.outcome(await gateway.submit('first'))
        gateway.recorder.gate.clear()
        before = psutil.Process().memory_info().rss
        futures = [await gateway.submit(f'a{n}', payload=b'%d' % n * (PAYLOAD_BYTES // 4)) for n in range(COUNT)]
        assert psutil.Process().memory_info().rss - before < MEMORY_BYTES
        gateway.acting_as('bob')
        other = await gateway.submit('b0')
        gateway.recorder.gate.set()
        assert await gateway.outcome(other) == b'0b'
        assert len(gateway.recorder.started) < 20
        gateway.acting_as('alice')
        for future in futures:
            await gateway.outcome(future)
        assert psutil.Process().memory_info().rss - before < MEMORY_BYTES
        assert len(gateway.recorder.started) == COUNT + 2
        assert gateway.recorder.peak['alice'] == 4
