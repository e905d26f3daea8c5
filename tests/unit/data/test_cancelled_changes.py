"""A cancelled request holds its tenant's lock until the thread that writes its files has finished."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fixtures.fake_samplers import until
from twinkle_services.data.application.datasets import DatasetLimits, Datasets
from twinkle_services.data.backends.disk_datasets import DiskDatasets
from twinkle_services.data.domain import Dataset, DecodedLimits, Table
from twinkle_services.data.domain.dataset import new_dataset
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.store_threads import StoreThreads

ALICE = Caller(tenant_id='alice', scopes=frozenset({'data'}))
UNLIMITED = DecodedLimits(rows=1000, dataset_bytes=1 << 30, tenant_bytes=1 << 30, total_bytes=1 << 30)
LIMITS = DatasetLimits(decoded=UNLIMITED, stored_bytes=1 << 30, datasets=10, queue_length=10)


class Gate:
    """A gate that stops a thread inside a function."""

    def __init__(self) -> None:
        self.is_reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        """Report that the thread has arrived, and wait until the gate is open."""
        self.is_reached.set()
        assert self.opened.wait(timeout=30)


class GatedThreads(StoreThreads):
    """A thread pool whose functions wait at the gate after they have run, if a gate is set."""

    gate: Gate | None = None
    running = 0
    most = 0
    """Largest number of functions that ran at the same time."""

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function in a thread, and return its result once the gate is open."""

        def gated() -> Any:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                result = function(*args, **kwargs)
                if self.gate is not None:
                    self.gate.wait()
                return result
            finally:
                self.running -= 1

        return await super().run(gated)


@pytest.fixture
def threads() -> Iterator[GatedThreads]:
    """Pool of two threads."""
    gated = GatedThreads('rows', count=2)
    yield gated
    gated.close()


async def _exported(datasets: Datasets, dataset: Dataset) -> bytes:
    pieces = datasets.export(ALICE, dataset.dataset_id, file_format='parquet', offset=0)
    return b''.join([piece.data async for piece in pieces])


async def test_repeated_export_waits_for_the_thread_of_the_cancelled_one(tmp_path: Path, threads: GatedThreads) -> None:
    """Two threads never write the same file: a repeated export waits for the end of the cancelled export's thread."""
    unused: Any = None
    store = DiskDatasets(tmp_path, threads)
    datasets = Datasets(store, unused, unused, unused, clock=FakeClock(), limits=LIMITS)
    table = Table(rows=[{'x': number} for number in range(10)])
    empty = new_dataset('ds-1', tenant_id='alice', create_time=datetime(2026, 1, 1, tzinfo=UTC))
    dataset = await store.save(empty.changed(table, (), ('r1', 'f1')), table)
    threads.gate = gate = Gate()
    cancelled = asyncio.create_task(_exported(datasets, dataset))
    await until(gate.is_reached.is_set)
    cancelled.cancel()
    repeated = asyncio.create_task(_exported(datasets, dataset))
    await asyncio.wait([repeated], timeout=0.1)
    assert threads.most == 1
    threads.gate = None
    gate.opened.set()
    assert (await repeated)[:4] == b'PAR1'
    with pytest.raises(asyncio.CancelledError):
        await cancelled
