"""Callers that wait in this process for futures to finish. Waiting needs no database query."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.gateway.futures.rules import Future, topic_name

Waiter = asyncio.Future[Future | None]
"""Resolves to the finished future, or to None if the caller has to read the store again."""


class Waiters:
    """Waiters by the id of a future or the name of a topic.

    Concurrency: one event loop.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[Waiter]] = {}
        self.is_closed = False
        """Whether waiters are no longer notified."""

    @contextmanager
    def waiting(self, name: str) -> Iterator[Waiter]:
        """Register a waiter, for the duration of the block, for a future's id or for a topic's `topic_name`."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, set()).add(waiter)
        if self.is_closed:
            waiter.set_result(None)
        try:
            yield waiter
        finally:
            others = self._waiting[name]
            others.discard(waiter)
            if not others:
                del self._waiting[name]

    def notify(self, future: Future) -> None:
        """Resolve the waiters of a finished future and of its topic."""
        for name in (future.future_id, topic_name(future.tenant_id, future.topic)):
            for waiter in self._waiting.get(name, ()):
                if not waiter.done():
                    waiter.set_result(future)

    def is_awaited(self, name: str) -> bool:
        """Return whether there is a waiter for a future's id or a topic's name."""
        return name in self._waiting

    def close(self) -> None:
        """Wake all waiters, and let no later one wait."""
        self.is_closed = True
        self.wake_all()

    def wake_all(self) -> None:
        """Let all waiters read the store."""
        for waiter in [item for waiting in self._waiting.values() for item in waiting]:
            if not waiter.done():
                waiter.set_result(None)
