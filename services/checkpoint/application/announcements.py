"""News for streams that wait: an adapter has a new version, a checkpoint has changed."""

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class Announcements:
    """Wakes those who wait for a topic. Carries no content: who wakes looks for itself."""

    def __init__(self) -> None:
        """Begin with nobody waiting."""
        self._waiting: dict[Hashable, set[asyncio.Event]] = {}

    @contextmanager
    def watch(self, topic: Hashable) -> Iterator[asyncio.Event]:
        """Give an event that is set at each announcement of the topic; the caller clears it."""
        event = asyncio.Event()
        self._waiting.setdefault(topic, set()).add(event)
        try:
            yield event
        finally:
            self._waiting[topic].discard(event)
            if not self._waiting[topic]:
                del self._waiting[topic]

    def announce(self, topic: Hashable) -> None:
        """Set the events of a topic."""
        for event in self._waiting.get(topic, ()):
            event.set()
