"""Turns at the engine: a bounded number of prompts inside, a bounded queue before it, fair between tenants."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from services.kit.errors import QueueFull
from services.sampler.domain.errors import EnginePaused
from services.sampler.domain.fair_queue import FairQueue
from services.sampler.domain.running_requests import RunningRequest


class Admission:
    """Hands out the engine's places.

    Concurrency: for one event loop.
    """

    def __init__(self, *, places: int, queue_limit: int) -> None:
        """Let `places` prompts into the engine, and `queue_limit` of each tenant wait."""
        self._places = places
        self._queue_limit = queue_limit
        self._inside = 0
        self._waiting = FairQueue[asyncio.Future[None]]()
        self._is_open = True
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting_count(self) -> int:
        """Prompts that wait for a place."""
        return len(self._waiting)

    @property
    def is_open(self) -> bool:
        """Whether new requests are let in."""
        return self._is_open

    def check_open(self, tenant_id: str) -> None:
        """Refuse a new request early.

        Raises:
            EnginePaused: nothing is let in.
            QueueFull: too many of the tenant's prompts wait.
        """
        if not self._is_open:
            raise EnginePaused()
        waiting = self._waiting.length_of(tenant_id)
        if waiting >= self._queue_limit:
            raise QueueFull(waiting, self._queue_limit)

    @asynccontextmanager
    async def turn(self, request: RunningRequest) -> AsyncGenerator[None, None]:
        """Wait for a place and hold it; a request that is aborted meanwhile gets through at once."""
        await self._enter(request)
        try:
            yield
        finally:
            self._inside -= 1
            self._let_in()

    def close(self) -> None:
        """Let no new request in; those that wait still get their turn."""
        self._is_open = False

    def open(self) -> None:
        """Let requests in again."""
        self._is_open = True

    async def wait_idle(self) -> None:
        """Wait until nothing is inside and nothing waits."""
        await self._idle.wait()

    async def _enter(self, request: RunningRequest) -> None:
        self._idle.clear()
        if self._inside < self._places and not len(self._waiting):
            self._inside += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.push(request.tenant_id, place)
        request.places.append(place)
        try:
            await place
        except asyncio.CancelledError:
            # The place may have been given in the very moment of cancelling; it goes to the next.
            if not self._waiting.discard(request.tenant_id, place) and not place.cancelled():
                self._inside -= 1
            self._let_in()
            raise
        finally:
            request.places.remove(place)

    def hasten(self, request: RunningRequest) -> None:
        """Let the waiting prompts of an aborted request through, beyond the number of places."""
        for place in request.places:
            if self._waiting.discard(request.tenant_id, place):
                self._give(place)

    def _let_in(self) -> None:
        while len(self._waiting) and self._inside < self._places:
            self._give(self._waiting.pop())
        if not self._inside and not len(self._waiting):
            self._idle.set()

    def _give(self, place: asyncio.Future[None]) -> None:
        if not place.done():
            self._inside += 1
            place.set_result(None)
