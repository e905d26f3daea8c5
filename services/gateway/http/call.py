"""One HTTP call being served, the routes that serve it, and the answers it may get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.gateway.http.memory import CallMemory
from services.kit.caller import Caller
from services.kit.errors import DomainError

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

JSON_TYPE = 'application/json'
_PIECE_BYTES = 1 << 18
"""Of an answer that are on their way at a time: the next ones wait until the client has read."""
EVENT_TYPE = 'text/event-stream; charset=utf-8'


class Dialect(Protocol):
    """How an API tells errors."""

    def status_of(self, error: DomainError) -> int:
        """Return the HTTP status."""
        ...

    def body_of(self, error: DomainError, *, request_id: str) -> dict[str, Any]:
        """Return what is told."""
        ...


class Answer(Protocol):
    """What a call is answered with."""

    async def write(self, call: HttpCall) -> None:
        """Write all of it to the client."""
        ...


def as_sent(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers: credentials are where every service looks for them."""
    return headers


@dataclass(frozen=True, kw_only=True)
class Route:
    """A path and what serves it."""

    path: str
    """As Starlette writes it."""
    http_method: str
    name: str
    """For logs, metrics and traces: 'openai.chat.completions'."""
    method: str
    """Method of the contract, with leading slash, whose rules of access hold."""
    serve: Callable[[HttpCall], Awaitable[Answer]]
    dialect: Dialect
    credentials: Callable[[Mapping[str, str]], Mapping[str, str]] = as_sent
    """Makes of a call's headers what the authenticator reads, where an API has its keys elsewhere."""
    identify: Callable[[HttpCall], Caller] | None = None
    """Tells who calls by the URL alone, or raises; None: the authenticator does, by the headers."""


@dataclass(eq=False)
class HttpCall:
    """Facts about a call, and its ends of the connection."""

    route: Route
    scope: Mapping[str, Any]
    receive: Receive
    send: Send
    headers: Mapping[str, str]
    """Names in lower case."""
    request_id: str
    caller: Caller | None = None
    memory: CallMemory | None = None
    """What it takes of its tenant's memory; None before it is known whose it is."""
    status: int = 0
    """What the client was told; 0 before anything."""
    is_streaming: bool = False
    """Whether events are being written: an error becomes the last of them."""
    body_done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once nobody reads the body any more."""
    ending: DomainError | None = None
    """Why the server ended it."""
    outcome: str = 'OK'
    """Reason it failed for, or 'OK'."""

    @property
    def path_values(self) -> Mapping[str, str]:
        """What the path's places were filled with."""
        return self.scope.get('path_params', {})

    async def begin(self, status: int, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        """Write the head of the answer."""
        self.status = status
        own = {'content-type': content_type, 'x-request-id': self.request_id, **(headers or {})}
        if not self.body_done.is_set():
            # What was not read of the body would be taken for the next request.
            own['connection'] = 'close'
        pairs = [(name.encode(), value.encode('latin-1', 'replace')) for name, value in own.items()]
        await self.send({'type': 'http.response.start', 'status': status, 'headers': pairs})

    async def write(self, data: bytes, *, is_last: bool) -> None:
        """Write a piece of the answer's body; waits while the client does not read."""
        for begin in range(0, len(data) - _PIECE_BYTES, _PIECE_BYTES):
            piece = data[begin : begin + _PIECE_BYTES]
            await self.send({'type': 'http.response.body', 'body': piece, 'more_body': True})
        rest = (len(data) - 1) // _PIECE_BYTES * _PIECE_BYTES if data else 0
        await self.send({'type': 'http.response.body', 'body': data[rest:], 'more_body': not is_last})

    async def take_body(self, size_bytes: int) -> None:
        """Count bytes of the body, or of its answer, until the call ends.

        Raises:
            BytesFull: there is no room for them.
        """
        if self.memory is not None:
            await self.memory.body.grow(size_bytes)

    def drop_body(self) -> None:
        """Say that the body is needed no more."""
        if self.memory is not None:
            self.memory.body.shrink_to(0)

    async def take_work(self, size_bytes: int) -> None:
        """Count memory for values that are made of the body, until the call ends or they are dropped.

        Raises:
            BytesFull: there is no room for them.
        """
        if self.memory is not None:
            await self.memory.work.grow(size_bytes)

    def drop_work(self) -> None:
        """Say that the values made of the body are needed no more."""
        if self.memory is not None:
            self.memory.work.shrink_to(0)


@dataclass(frozen=True)
class JsonAnswer:
    """A JSON document."""

    body: Mapping[str, Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    async def write(self, call: HttpCall) -> None:
        """Write all of it."""
        data = json_bytes(self.body)
        await call.begin(self.status, JSON_TYPE, {'content-length': str(len(data)), **self.headers})
        await call.write(data, is_last=True)


@dataclass(frozen=True)
class EventAnswer:
    """Server-sent events, each a JSON document.

    The head is written with the first event, so that what is refused before it has a status of its own.
    """

    events: AsyncGenerator[Mapping[str, Any], None]
    end: bytes = b'data: [DONE]\n\n'

    async def write(self, call: HttpCall) -> None:
        """Write events as they come; the next one is made when this one is on its way."""
        async with aclosing(self.events) as events:
            async for event in events:
                if not call.is_streaming:
                    call.is_streaming = True
                    await call.begin(200, EVENT_TYPE, {'cache-control': 'no-cache', 'x-accel-buffering': 'no'})
                await call.write(event_bytes(event), is_last=False)
        if not call.is_streaming:
            await call.begin(200, EVENT_TYPE)
        await call.write(self.end, is_last=True)


_LINE_ENDS = {ord(end): f'\\u{ord(end):04x}' for end in '\u0085\u2028\u2029'}


def event_bytes(event: Mapping[str, Any]) -> bytes:
    """Return one server-sent event. What some readers take for the end of a line is escaped."""
    text = _json_text(event)
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return f'data: {text}\n\n'.encode()


def json_bytes(body: Mapping[str, Any]) -> bytes:
    """Return a JSON document, the shortest way; only finite numbers may be in it."""
    return _json_text(body).encode()


def _json_text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(',', ':'), allow_nan=False)
