"""Admission to the engine, with a limited number of running prompts and a limited, fair queue of waiting prompts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from twinkle_services.kit.errors import QueueFull
from twinkle_services.sampler.domain.errors import EnginePaused
from twinkle_services.sampler.domain.fair_queue import FairQueue
from twinkle_services.sampler.domain.generation import EngineLoad
from twinkle_services.sampler.domain.running_requests import RunningRequest, RunningRequests
from twinkle_services.sampler.ports import SamplerEngine


class Admission:
    """Grants the engine's slots to prompts, one slot per prompt, in round-robin order of the tenants.

    Concurrency: use it from one event loop only.
    """

    def __init__(self, engine: SamplerEngine, *, slots: int, queue_limit: int) -> None:
        """Create the slots, which are all free.

        Args:
            engine: Engine whose slots are granted.
            slots: Maximum number of prompts that run in the engine at once.
            queue_limit: Number of waiting prompts of a tenant at which new requests of the tenant are refused.
        """
        self.slots = slots
        """Maximum number of prompts that run in the engine at once."""
        self.requests = RunningRequests()
        """Requests that are being served, including those that hold no slot."""
        self._engine = engine
        self._queue_limit = queue_limit
        self._running = 0
        self._waiting = FairQueue[asyncio.Future[None]]()
        self._is_open = True
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def load(self) -> EngineLoad:
        """Current load of the engine; the prompts that wait for a slot count as waiting sequences."""
        load = self._engine.load
        return replace(load, waiting_sequences=load.waiting_sequences + self.waiting_count)

    @property
    def waiting_count(self) -> int:
        """Number of prompts that wait for a slot."""
        return len(self._waiting)

    @property
    def is_open(self) -> bool:
        """Whether new requests are admitted."""
        return self._is_open

    def check_open(self, tenant_id: str) -> None:
        """Check that a new request can be admitted.

        Raises:
            EnginePaused: Admission is closed.
            QueueFull: The tenant already has `queue_limit` prompts waiting.
        """
        if not self._is_open:
            raise EnginePaused()
        waiting = self._waiting.length_of(tenant_id)
        if waiting >= self._queue_limit:
            raise QueueFull(waiting, self._queue_limit)

    @asynccontextmanager
    async def slot(self, request: RunningRequest) -> AsyncGenerator[None, None]:
        """Wait for a slot and hold it within this block; `admit_aborted` ends the wait of an aborted request."""
        await self._acquire(request)
        try:
            yield
        finally:
            self._running -= 1
            self._admit_next()

    def close(self) -> None:
        """Refuse new requests; prompts that are already waiting still get slots."""
        self._is_open = False

    def open(self) -> None:
        """Admit new requests again."""
        self._is_open = True

    async def wait_idle(self) -> None:
        """Wait until no prompt is running or waiting."""
        await self._idle.wait()

    def admit_aborted(self, request: RunningRequest) -> None:
        """Admit the waiting prompts of an aborted request immediately, even if no slot is free."""
        for waiter in request.slot_waiters:
            if self._waiting.discard(request.tenant_id, waiter):
                self._grant(waiter)

    async def _acquire(self, request: RunningRequest) -> None:
        self._idle.clear()
        if self._running < self.slots and not len(self._waiting):
            self._running += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.push(request.tenant_id, waiter)
        request.slot_waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            # If the slot was granted in the same iteration of the event loop, release it.
            if not self._waiting.discard(request.tenant_id, waiter) and not waiter.cancelled():
                self._running -= 1
            self._admit_next()
            raise
        finally:
            request.slot_waiters.remove(waiter)

    def _admit_next(self) -> None:
        while len(self._waiting) and self._running < self.slots:
            self._grant(self._waiting.pop())
        if not self._running and not len(self._waiting):
            self._idle.set()

    def _grant(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            self._running += 1
            waiter.set_result(None)
