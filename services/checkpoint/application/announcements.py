"""Notifies waiting streams of changes: an adapter has a new version, or a checkpoint has changed."""

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from twinkle_services.kit.errors import Draining


class Announcements:
    """Wakes the watchers of a topic. An announcement has no content; a watcher reads the new state itself."""

    def __init__(self) -> None:
        self._watchers: dict[Hashable, set[asyncio.Event]] = {}
        self._is_closed = False

    @contextmanager
    def watch(self, topic: Hashable) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each announcement of the topic.

        To miss no change, clear the event, read the state, and then call `wait`.
        """
        event = asyncio.Event()
        self._watchers.setdefault(topic, set()).add(event)
        try:
            yield event
        finally:
            self._watchers[topic].discard(event)
            if not self._watchers[topic]:
                del self._watchers[topic]

    def is_watched(self, topic: Hashable) -> bool:
        """Return whether the topic has a watcher."""
        return topic in self._watchers

    def announce(self, topic: Hashable) -> None:
        """Set the events of a topic's watchers."""
        for event in self._watchers.get(topic, ()):
            event.set()

    async def wait(self, event: asyncio.Event) -> None:
        """Wait until `event` is set.

        Raises:
            Draining: The service is shutting down.
        """
        if not self._is_closed:
            await event.wait()
        if self._is_closed:
            raise Draining()

    def close(self) -> None:
        """Make every wait raise `Draining`, so that open streams do not delay shutdown."""
        self._is_closed = True
        for events in self._watchers.values():
            for event in events:
                event.set()
