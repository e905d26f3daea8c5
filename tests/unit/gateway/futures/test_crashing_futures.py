"""Futures that crash the gateway's process whenever they run, and the futures that run at the same time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from fixtures.future_stores import MemoryFutureStore, MemoryPayloadStore
from fixtures.futures import GatewayFutures, Recorder, running_futures
from fixtures.tiers import mostly_slow
from twinkle_services.gateway.errors import RequestCrashed
from twinkle_services.gateway.futures.records import MAX_CRASHES
from twinkle_services.gateway.futures.rules import Future

POISON = 'poison'
INNOCENT = [f'innocent-{number}' for number in range(6)]


@dataclass
class _Crashing(Recorder):
    """An executor that crashes the process when it runs the poisoned future."""

    crashed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        if future.key == POISON:
            self.crashed.set()
            await asyncio.Event().wait()
        return await super().__call__(future, payload)


class _Disk(MemoryPayloadStore):
    """Payload store whose writes never complete once its process has crashed."""

    is_process_dead = False

    async def put(self, name: str, data: bytes) -> None:
        await self._check()
        await super().put(name, data)

    async def delete(self, name: str) -> None:
        await self._check()
        await super().delete(name)

    async def _check(self) -> None:
        if self.is_process_dead:
            await asyncio.Event().wait()


@dataclass
class _Machine:
    """The stores that several processes use one after the other."""

    rows: MemoryFutureStore = field(default_factory=MemoryFutureStore)
    disk: _Disk = field(default_factory=_Disk)

    @asynccontextmanager
    async def process(self, executor: Recorder) -> AsyncIterator[GatewayFutures]:
        self.disk.is_process_dead = False
        async with running_futures(executor, stores=(self.rows, self.disk)) as gateway:
            yield gateway

    async def run_until_crash(self, keys: list[str] | None = None, *, is_busy: bool) -> list[Future]:
        """Run a process until the poisoned future crashes it. If `is_busy`, no other future finishes before that."""
        executor = _Crashing()
        if is_busy:
            executor.gate.clear()
        async with self.process(executor) as gateway:
            futures = [await gateway.submit(key) for key in keys or ()]
            await executor.crashed.wait()
            self.disk.is_process_dead = True
        return futures


async def _outcomes(gateway: GatewayFutures, futures: list[Future]) -> dict[str, Any]:
    return {future.key: await gateway.outcome(future) for future in futures}


@pytest.mark.parametrize(
    'keys', mostly_slow([[POISON, *INNOCENT], [*INNOCENT, POISON], [*INNOCENT[:3], POISON, *INNOCENT[3:]]])
)
async def test_only_the_crashing_future_fails(keys: list[str]) -> None:
    """A future fails after a bounded number of crashes; others succeed even if they ran during earlier crashes."""
    machine = _Machine()
    futures = await machine.run_until_crash(keys, is_busy=True)
    for crashes in range(MAX_CRASHES):
        await machine.run_until_crash(is_busy=crashes < MAX_CRASHES - 1)
    async with machine.process(_Crashing()) as gateway:
        outcomes = await _outcomes(gateway, futures)
    error = outcomes.pop(POISON)
    assert isinstance(error, RequestCrashed)
    assert error.metadata() == {'failureCount': str(MAX_CRASHES)}
    assert outcomes == {key: key.encode()[::-1] for key in INNOCENT}
    assert [name for name in machine.disk.kept if name.endswith('.attempts')] == []


async def test_restarts_without_a_crash_are_not_counted() -> None:
    """A future that is interrupted by any number of regular stops does not fail."""
    machine, waiting = _Machine(), Recorder()
    waiting.gate.clear()
    async with machine.process(waiting) as gateway:
        future = await gateway.submit('long')
        await waiting.has_started(1)
    for _ in range(2 * MAX_CRASHES):
        waiting.started.clear()
        async with machine.process(waiting):
            await waiting.has_started(1)
    async with machine.process(Recorder()) as gateway:
        assert await gateway.outcome(future) == b'gnol'
