"""A tenant's calls of PeekRows run one at a time, so that the calls do not occupy all threads."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from twinkle_services.data.application.datasets import DatasetLimits, Datasets
from twinkle_services.data.backends.disk_datasets import DiskDatasets
from twinkle_services.data.domain import Dataset, DecodedLimits, Row, Table
from twinkle_services.data.domain.dataset import new_dataset
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import QueueFull
from twinkle_services.kit.store_threads import StoreThreads

UNLIMITED = DecodedLimits(rows=1000, dataset_bytes=1 << 30, tenant_bytes=1 << 30, total_bytes=1 << 30)
LIMITS = DatasetLimits(decoded=UNLIMITED, stored_bytes=1 << 30, datasets=10, queue_length=2)


class BlockedRows:
    """Reader that returns rows once the test continues. It counts the running reads of each tenant."""

    def __init__(self, tenant_id: str, running: Counter[str], continued: asyncio.Event) -> None:
        self._tenant_id, self._running, self._continued = tenant_id, running, continued

    async def read(self, indices: Sequence[int]) -> list[Row]:
        """Return a row for each index once the test continues."""
        self._running[self._tenant_id] += 1
        await self._continued.wait()
        self._running[self._tenant_id] -= 1
        return [{'x': index} for index in indices]


class BlockedDatasets(DiskDatasets):
    """Store with readers that wait for the test."""

    def __init__(self, folder: Path, threads: StoreThreads) -> None:
        super().__init__(folder, threads)
        self.running: Counter[str] = Counter()
        self.continued = asyncio.Event()

    async def reader(self, dataset: Dataset) -> Any:
        """Return a reader that waits for the test."""
        return BlockedRows(dataset.tenant_id, self.running, self.continued)


async def test_peeks_of_a_tenant_take_turns(tmp_path: Path) -> None:
    """One call of each tenant reads rows at a time, and a limited number of its calls may wait."""
    threads = StoreThreads('rows', count=1)
    unused: Any = None
    store, table = BlockedDatasets(tmp_path, threads), Table(rows=[{'x': 0}, {'x': 1}])
    datasets = Datasets(store, unused, unused, unused, clock=FakeClock(), limits=LIMITS)
    for tenant_id in ('alice', 'bob'):
        empty = new_dataset(f'ds-{tenant_id}', tenant_id=tenant_id, create_time=datetime(2026, 1, 1, tzinfo=UTC))
        await store.save(empty.changed(table, (), ('r1', 'f1')), table)

    async def peek(tenant_id: str) -> list[Row | None]:
        caller = Caller(tenant_id=tenant_id, scopes=frozenset({'data'}))
        return [item.row for item in await datasets.peek(caller, f'ds-{tenant_id}', begin=0, count=5)]

    peeks = [asyncio.create_task(peek(tenant_id)) for tenant_id in ('alice', 'alice', 'alice', 'bob')]
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.running == {'alice': 1, 'bob': 1}
    with pytest.raises(QueueFull):
        await peek('alice')
    store.continued.set()
    assert await asyncio.gather(*peeks) == [table.rows] * 4
    threads.close()
