"""Memory of the GPUs of vLLM's workers, which are separate processes and respond between two engine steps."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from twinkle.sampler.errors import EngineFailed


class WorkerMemory:
    """Reads the memory of the workers regularly.

    Args:
        read: Returns the bytes of the GPUs' memory by state; empty on a CPU.
        interval_seconds: Time between two readings.

    Concurrency: any thread may read `newest`.
    """

    def __init__(self, read: Callable[[], Awaitable[Mapping[str, int]]], *, interval_seconds: float = 10.0) -> None:
        self._read, self._interval_seconds = read, interval_seconds
        self.newest: Mapping[str, int] = {}
        """Result of the last reading."""

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read during the block, until the engine fails. On a CPU, the memory is read once."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self) -> None:
        with suppress(EngineFailed):
            while memory := await self._read():
                self.newest = memory
                await asyncio.sleep(self._interval_seconds)
