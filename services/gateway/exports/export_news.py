"""Wakes those of this process that carry exports out, where something about exports changed here."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class ExportNews:
    """Says that something changed, not what: whoever hears it looks for itself. For one event loop."""

    def __init__(self) -> None:
        """Begin with nobody listening."""
        self._listening: set[asyncio.Future[None]] = set()

    @contextmanager
    def heard(self) -> Iterator[asyncio.Future[None]]:
        """Give what is done as soon as `tell` is called during the block.

        Whoever looks inside of the block, and then waits, misses nothing.
        """
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listening.add(news)
        try:
            yield news
        finally:
            self._listening.discard(news)

    def tell(self) -> None:
        """Wake all that listen."""
        for news in self._listening:
            if not news.done():
                news.set_result(None)
