"""Streams of batches that continue where the previous call of a loader ended."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from twinkle_services.data.domain import Cursor, Dataset, Loader
from twinkle_services.data.ports import BatchStream, RowEngine
from twinkle_services.kit.errors import QueueFull


class LiveStreams:
    """Keeps the stream of each loader open between calls, because a new stream is read from its beginning.

    The number of open streams is limited; streams that no call uses are closed first, the oldest one at first.
    """

    def __init__(self, engine: RowEngine, *, limit: int) -> None:
        """Allow at most `limit` open streams."""
        self._engine, self._limit = engine, limit
        self._idle: dict[str, BatchStream] = {}
        """Streams that no call uses, by loader."""
        self._used_count = 0
        """Number of streams that calls use."""

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
            self._make_room()
            stream = self._engine.stream(dataset, loader, consumed=consumed)
        self._used_count += 1
        try:
            yield stream
        finally:
            self._used_count -= 1
            self._keep(loader.loader_id, stream)

    def close(self, loader_id: str) -> None:
        """Close the stream of a loader unless a call uses it."""
        stream = self._idle.pop(loader_id, None)
        if stream is not None:
            stream.close()

    def close_all(self) -> None:
        """Close all streams that no call uses, and those in use once their calls end."""
        self._limit = 0
        for loader_id in list(self._idle):
            self.close(loader_id)

    def _make_room(self) -> None:
        while self._idle and self._used_count + len(self._idle) >= self._limit:
            self.close(next(iter(self._idle)))
        if self._used_count >= self._limit:
            raise QueueFull(self._used_count, self._limit)

    def _keep(self, loader_id: str, stream: BatchStream) -> None:
        if stream.is_failed or loader_id in self._idle or not self._limit:
            stream.close()
        else:
            self._idle[loader_id] = stream
