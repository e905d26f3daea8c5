"""Connections of HTTP clients: a bounded number, and none that only holds its place.

uvicorn 0.54 waits without end for the rest of a head, for the first one also, and for a client to read its answer.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""How long the head of a request may take to arrive."""
UNREAD_SECONDS = 120.0
"""How long a client may read nothing of an answer that waits for it."""


class BoundedConnection(H11Protocol):
    """One connection; cut where it is one too many, or its client is too slow."""

    def __init__(
        self,
        *args: Any,
        limit: int,
        head_seconds: float = HEAD_SECONDS,
        unread_seconds: float = UNREAD_SECONDS,
        **fields: Any,
    ) -> None:
        """Be one of at most `limit` connections of its server; the rest is uvicorn's."""
        super().__init__(*args, **fields)
        self._limit = limit
        self._head_seconds = head_seconds
        self._unread_seconds = unread_seconds
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limit:
            transport.abort()
            return
        self._expect_head(self._head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Watch nothing any more."""
        self._expect_head(None)
        self._expect_reader(is_awaited=False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._expect_head(None)

    def on_response_complete(self) -> None:
        """Go on with the next request, if it is here."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self._expect_head(self.timeout_keep_alive + self._head_seconds)

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._expect_reader(is_awaited=True)

    def resume_writing(self) -> None:
        """Write on."""
        super().resume_writing()
        self._expect_reader(is_awaited=False)

    def _expect_head(self, seconds: float | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _expect_reader(self, *, is_awaited: bool) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._unread_timer = self.loop.call_later(self._unread_seconds, self.transport.abort) if is_awaited else None
