"""Events on their way from the engine's thread to one reader on the event loop, bounded."""

import asyncio
import threading
from collections.abc import Sequence

from twinkle.sampler.engine import EngineEvent


class EngineFailed(Exception):
    """The engine broke while it computed this request; what happened is in the log."""


class Mailbox:
    """Holds what a reader has not taken yet.

    Concurrency: `put` and `fail` for the engine's thread, `take` for one task of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, limit: int) -> None:
        """Call itself full from `limit` events on."""
        self._loop = loop
        self._limit = limit
        self._lock = threading.Lock()
        self._events: list[EngineEvent] = []
        self._is_full = False
        self._is_failed = False
        self._ready = asyncio.Event()

    def put(self, events: Sequence[EngineEvent]) -> bool:
        """Add events; return whether the box is full, so that no more should be made for now."""
        with self._lock:
            self._events.extend(events)
            self._is_full = len(self._events) >= self._limit
            is_full = self._is_full
        self._loop.call_soon_threadsafe(self._ready.set)
        return is_full

    def fail(self) -> None:
        """Let the reader know that nothing more will come."""
        self._is_failed = True
        self._loop.call_soon_threadsafe(self._ready.set)

    @property
    def size(self) -> int:
        """Events that wait."""
        return len(self._events)

    async def take(self) -> tuple[list[EngineEvent], bool]:
        """Wait for events and take all there are.

        Returns:
            The events, and whether the box was full, so that more may be made again.

        Raises:
            EngineFailed: the engine broke.
        """
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            events, self._events = self._events, []
            was_full, self._is_full = self._is_full, False
        if self._is_failed:
            raise EngineFailed
        return events, was_full
