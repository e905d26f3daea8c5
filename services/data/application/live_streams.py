"""Streams of batches that continue where the previous call of a loader ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from twinkle_services.data.domain import Cursor, Dataset, Loader
from twinkle_services.data.ports import BatchStream, RowEngine
from twinkle_services.kit.errors import QueueFull, QuotaExceeded

IDLE_SECONDS = 600.0
"""Time for which a stream that no call uses is kept, in seconds."""


@dataclass(frozen=True)
class _Idle:
    """A stream that no call uses."""

    tenant_id: str
    process_count: int
    stream: BatchStream
    timer: asyncio.TimerHandle
    """Timer that closes the stream."""

    def is_kept_from(self, tenant_id: str) -> bool:
        """Return whether calls of a tenant must not close the stream, because it reads rows for another tenant."""
        return self.stream.is_reading and self.tenant_id != tenant_id


@dataclass(frozen=True)
class _Used:
    """A stream that a call uses."""

    loader_id: str
    tenant_id: str
    process_count: int


class LiveStreams:
    """Keeps the stream of each loader open between calls, because a new stream is read from its beginning.

    The number of processes of open streams is limited, in total and for each tenant. Streams that no call uses are
    closed after some time, or when another stream needs their place, the oldest first. Streams that are still reading
    rows are closed last, and only for streams of the same tenant, because their progress would be lost.
    """

    def __init__(self, engine: RowEngine, *, limit: int, tenant_limit: int, idle_seconds: float = IDLE_SECONDS) -> None:
        """Allow at most `limit` processes of open streams, and `tenant_limit` for each tenant."""
        self._engine, self._limit, self._tenant_limit = engine, limit, tenant_limit
        self._idle_seconds = idle_seconds
        self._idle: dict[str, _Idle] = {}
        """Streams that no call uses, by loader."""
        self._used: list[_Used] = []
        self._closed: set[str] = set()
        """Loaders that were closed while calls used their streams."""

    @asynccontextmanager
    async def of(self, dataset: Dataset, loader: Loader, cursor: Cursor | None) -> AsyncIterator[BatchStream]:
        """Return the stream of a loader after a cursor, for one call.

        Raises:
            InvalidField: See `Loader.rows_before`.
            QueueFull: Too many streams are in use, in total or by the tenant.
            QuotaExceeded: The dataset is a mixture of more streams than a tenant may read at the same time.
        """
        consumed = 0 if cursor is None else loader.rows_before(cursor)
        stream = self._taken(loader.loader_id)
        if stream is not None and stream.consumed != consumed:
            stream.close()
            stream = None
        if stream is None:
            self._make_room(loader.tenant_id, dataset.process_count)
            stream = self._engine.stream(dataset, loader, consumed=consumed)
        used = _Used(loader.loader_id, loader.tenant_id, dataset.process_count)
        self._used.append(used)
        try:
            yield stream
        finally:
            self._used.remove(used)
            self._keep(used, stream)

    def close(self, loader_id: str) -> None:
        """Close the stream of a loader, or once its call ends if a call uses it."""
        if any(used.loader_id == loader_id for used in self._used):
            self._closed.add(loader_id)
        stream = self._taken(loader_id)
        if stream is not None:
            stream.close()

    def close_all(self) -> None:
        """Close all streams that no call uses, and those in use once their calls end."""
        self._limit = 0
        for loader_id in list(self._idle):
            self.close(loader_id)

    def _make_room(self, tenant_id: str, process_count: int) -> None:
        if process_count > self._tenant_limit:
            raise QuotaExceeded('streamed_datasets', self._tenant_limit)
        own_count = sum(used.process_count for used in self._used if used.tenant_id == tenant_id)
        used_count = sum(used.process_count for used in self._used)
        kept_count = sum(idle.process_count for idle in self._idle.values() if idle.is_kept_from(tenant_id))
        # A refused call closes no stream.
        for count, limit in ((own_count, self._tenant_limit), (used_count + kept_count, self._limit)):
            if count + process_count > limit:
                raise QueueFull(count, limit)
        idle = sorted(self._idle.items(), key=lambda item: item[1].stream.is_reading)
        closable = [loader_id for loader_id, stream in idle if not stream.is_kept_from(tenant_id)]
        own = [loader_id for loader_id in closable if self._idle[loader_id].tenant_id == tenant_id]
        while own and own_count + process_count + self._idle_count(tenant_id) > self._tenant_limit:
            closable.remove(own[0])
            self.close(own.pop(0))
        while closable and used_count + process_count + self._idle_count() > self._limit:
            self.close(closable.pop(0))

    def _idle_count(self, tenant_id: str = '') -> int:
        """Return the number of processes of the unused streams of a tenant; an empty id means all tenants."""
        return sum(idle.process_count for idle in self._idle.values() if tenant_id in ('', idle.tenant_id))

    def _taken(self, loader_id: str) -> BatchStream | None:
        """Remove and return the idle stream of a loader; None if the loader has no idle stream."""
        idle = self._idle.pop(loader_id, None)
        if idle is None:
            return None
        idle.timer.cancel()
        return idle.stream

    def _keep(self, used: _Used, stream: BatchStream) -> None:
        loader_id = used.loader_id
        is_closed = loader_id in self._closed
        if all(other.loader_id != loader_id for other in self._used):
            self._closed.discard(loader_id)
        if is_closed or stream.is_failed or loader_id in self._idle or not self._limit:
            stream.close()
            return
        timer = asyncio.get_running_loop().call_later(self._idle_seconds, self.close, loader_id)
        self._idle[loader_id] = _Idle(used.tenant_id, used.process_count, stream, timer)
