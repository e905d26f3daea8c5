"""A bounded buffer of events between the engine's thread and one reader on the event loop."""

import asyncio
import threading
from collections.abc import Sequence

from twinkle.sampler.engine import EngineEvent
from twinkle_services.sampler.domain.errors import EngineFailed


class Mailbox:
    """Buffers the events that a reader has not read yet.

    Concurrency: the engine's thread calls `put` and `fail`; one task of the event loop calls `take`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, limit: int) -> None:
        """Create an empty mailbox for a reader on `loop`; the mailbox is full if it has at least `limit` events."""
        self._loop = loop
        self._limit = limit
        self._lock = threading.Lock()
        self._events: list[EngineEvent] = []
        self._is_full = False
        self._is_failed = False
        self._ready = asyncio.Event()

    def put(self, events: Sequence[EngineEvent]) -> bool:
        """Add events, and return whether the mailbox is full and the request should be parked."""
        with self._lock:
            self._events.extend(events)
            self._is_full = len(self._events) >= self._limit
            is_full = self._is_full
        self._loop.call_soon_threadsafe(self._ready.set)
        return is_full

    def fail(self) -> None:
        """Make the reader's next `take` raise EngineFailed."""
        self._is_failed = True
        self._loop.call_soon_threadsafe(self._ready.set)

    @property
    def size(self) -> int:
        """Number of buffered events."""
        return len(self._events)

    async def take(self) -> tuple[list[EngineEvent], bool]:
        """Wait for events, and remove and return all of them.

        Returns:
            The events, possibly an empty list, and whether the mailbox was full. If so, a parked request may continue.

        Raises:
            EngineFailed: The engine failed or was closed.
        """
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            events, self._events = self._events, []
            was_full, self._is_full = self._is_full, False
        if self._is_failed:
            raise EngineFailed
        return events, was_full
