"""News for streams that wait: an adapter has a new version, a checkpoint has changed."""

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from services.kit.errors import Draining


class Announcements:
    """Wakes those who wait for a topic. Carries no content: who wakes looks for itself."""

    def __init__(self) -> None:
        """Begin with nobody waiting."""
        self._waiting: dict[Hashable, set[asyncio.Event]] = {}
        self._is_closed = False

    @contextmanager
    def watch(self, topic: Hashable) -> Iterator[asyncio.Event]:
        """Give an event that is set at each announcement of the topic; clear it, look, then `wait`."""
        event = asyncio.Event()
        self._waiting.setdefault(topic, set()).add(event)
        try:
            yield event
        finally:
            self._waiting[topic].discard(event)
            if not self._waiting[topic]:
                del self._waiting[topic]

    def is_watched(self, topic: Hashable) -> bool:
        """Say whether anybody waits for a topic."""
        return topic in self._waiting

    def announce(self, topic: Hashable) -> None:
        """Set the events of a topic."""
        for event in self._waiting.get(topic, ()):
            event.set()

    async def wait(self, event: asyncio.Event) -> None:
        """Return once `event` is set.

        Raises:
            Draining: there will be no more news.
        """
        if not self._is_closed:
            await event.wait()
        if self._is_closed:
            raise Draining()

    def close(self) -> None:
        """End every wait: streams that follow would otherwise hold up the end of the service."""
        self._is_closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()
