"""The memory of vLLM's workers is read regularly while the engine serves; the workers of these tests are fakes."""

import asyncio
from collections.abc import Mapping

from twinkle.sampler.errors import EngineFailed
from twinkle_services.sampler.backends.worker_memory import WorkerMemory


class FakeWorkers:
    """Workers whose allocated memory grows with each reading; after some readings, they fail."""

    def __init__(self, *, readings: int, is_cpu: bool = False) -> None:
        self._readings, self._is_cpu = readings, is_cpu
        self.count = 0
        self.stopped = asyncio.Event()

    async def read(self) -> Mapping[str, int]:
        """Return the memory of the workers."""
        self.count += 1
        if self.count == self._readings:
            self.stopped.set()
        if self.count > self._readings:
            raise EngineFailed('the engine has exited')
        return {} if self._is_cpu else {'allocated': 100 * self.count, 'total': 1000}


async def test_the_last_reading_remains_after_a_failure() -> None:
    """Memory is read until the engine fails, and the last reading remains available."""
    workers = FakeWorkers(readings=3)
    memory = WorkerMemory(workers.read, interval_seconds=0)
    assert memory.newest == {}
    async with memory.reading():
        await workers.stopped.wait()
    assert memory.newest == {'allocated': 300, 'total': 1000}


async def test_reading_ends_with_the_block() -> None:
    """No reading begins after the end of the block, although the next reading was due."""
    workers = FakeWorkers(readings=1)
    memory = WorkerMemory(workers.read, interval_seconds=3600)
    async with memory.reading():
        await workers.stopped.wait()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert (workers.count, memory.newest['allocated']) == (1, 100)


async def test_workers_on_a_cpu_are_read_once() -> None:
    """An empty reading ends the readings, so an engine on a CPU is not interrupted."""
    workers = FakeWorkers(readings=5, is_cpu=True)
    memory = WorkerMemory(workers.read, interval_seconds=0)
    async with memory.reading():
        for _ in range(20):
            await asyncio.sleep(0)
    assert (workers.count, memory.newest) == (1, {})
