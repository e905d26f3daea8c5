"""Streams of batches that continue where the previous call of a loader ended."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from twinkle_services.data.domain import Cursor, Dataset, Loader
from twinkle_services.data.ports import BatchStream, RowEngine
from twinkle_services.kit.errors import QueueFull


class LiveStreams:
    """Keeps the stream of each loader open between calls, because a new stream is read from its beginning.

    The number of open streams is limited. For a new stream, the oldest one that no call uses is closed.
    """

    def __init__(self, engine: RowEngine, *, limit: int) -> None:
        """Allow at most `limit` open streams."""
        self._engine, self._limit = engine, limit
        self._idle: dict[str, BatchStream] = {}
        """Streams that no call uses, by loader."""
        self._used = Counter[str]()
        """Numbers of streams that calls use, by loader."""
        self._closed: set[str] = set()
        """Loaders that were closed while calls use their streams."""

    @asynccontextmanager
    async def of(self, dataset: Dataset, loader: Loader, cursor: Cursor | None) -> AsyncIterator[BatchStream]:
        """Return the stream of a loader after a cursor, for one call.

        Raises:
            InvalidField: See `Loader.rows_before`.
            QueueFull: Too many streams are in use.
        """
        consumed = 0 if cursor is None else loader.rows_before(cursor)
        stream = self._idle.pop(loader.loader_id, None)
        if stream is not None and stream.consumed != consumed:
            stream.close()
            stream = None
        if stream is None:
            self._close_oldest()
            stream = self._engine.stream(dataset, loader, consumed=consumed)
        self._used[loader.loader_id] += 1
        try:
            yield stream
        finally:
            self._release(loader.loader_id, stream)

    def close(self, loader_id: str) -> None:
        """Close the stream of a loader; one that a call uses is closed at the end of the call."""
        if self._used[loader_id]:
            self._closed.add(loader_id)
        stream = self._idle.pop(loader_id, None)
        if stream is not None:
            stream.close()

    def close_all(self) -> None:
        """Close all streams that no call uses, and those in use once their calls end."""
        self._limit = 0
        for loader_id in list(self._idle):
            self.close(loader_id)

    def _close_oldest(self) -> None:
        """Close unused streams until another one can be opened.

        Raises:
            QueueFull: Calls use as many streams as are allowed.
        """
        used_count = self._used.total()
        while self._idle and used_count + len(self._idle) >= self._limit:
            self._idle.pop(next(iter(self._idle))).close()
        if used_count >= self._limit:
            raise QueueFull(used_count, self._limit)

    def _release(self, loader_id: str, stream: BatchStream) -> None:
        self._used[loader_id] -= 1
        if stream.is_failed or loader_id in self._idle or loader_id in self._closed or not self._limit:
            stream.close()
        else:
            self._idle[loader_id] = stream
        if not self._used[loader_id]:
            del self._used[loader_id]
            self._closed.discard(loader_id)
