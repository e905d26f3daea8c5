"""Who waits for which future, and the news for them: no database is asked while somebody waits."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.gateway.futures.news import topic_name
from services.gateway.futures.rules import Future

News = asyncio.Future[Future | None]
"""Gets the finished future; None: something may have been missed, or nothing more will be told here."""


class Bulletin:
    """Tells of futures that are finished. For one event loop; it remembers only who waits now."""

    def __init__(self) -> None:
        """Begin with nobody waiting."""
        self._waiting: dict[str, set[News]] = {}
        self.is_closed = False
        """Whether nothing more will be told."""

    @contextmanager
    def listening(self, future_id: str) -> Iterator[News]:
        """Hear of the future in this block; or of the first one of a topic, by its `topic_name`."""
        news: News = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(future_id, set()).add(news)
        if self.is_closed:
            news.set_result(None)
        try:
            yield news
        finally:
            waiting = self._waiting[future_id]
            waiting.discard(news)
            if not waiting:
                del self._waiting[future_id]

    def tell(self, future: Future) -> None:
        """Wake those that wait for a future, which is finished."""
        for name in (future.future_id, topic_name(future.tenant_id, future.topic)):
            for news in self._waiting.get(name, ()):
                if not news.done():
                    news.set_result(future)

    def is_awaited(self, name: str) -> bool:
        """Whether somebody waits for the future of that id, or for a topic of that name."""
        return name in self._waiting

    def close(self) -> None:
        """Let nobody wait any longer."""
        self.is_closed = True
        self.wake_all()

    def wake_all(self) -> None:
        """Let all that wait now look for themselves."""
        for news in [item for waiting in self._waiting.values() for item in waiting]:
            if not news.done():
                news.set_result(None)
