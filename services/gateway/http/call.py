"""HTTP calls in progress, the routes that serve them, and their responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from twinkle_services.kit.byte_gate import ByteGate, Hold
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import Code, DomainError
from twinkle_services.kit.ids import new_id

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

JSON_TYPE = 'application/json'
EVENT_TYPE = 'text/event-stream; charset=utf-8'
HEAD_BYTES = (1 << 17) + (1 << 8)
"""Number of leading bytes of a body that `BodyEnds` stores; enough for a zstd block of 128 KiB."""
TAIL_BYTES = 1 << 12  # trailing bytes that `BodyEnds` stores
_CHUNK_BYTES = 1 << 18
"""Maximum number of bytes passed to the transport at a time; a client that does not read delays the next chunk."""
_MODEL_BYTES = 1344
"""Upper bound for the bytes of a pydantic model without its values, measured with chat messages."""


@dataclass(frozen=True, kw_only=True)
class MemoryGates:
    """Memory budgets of all calls."""

    bodies: ByteGate
    """Bytes of request bodies and large responses; reserved until the response is sent."""
    work: ByteGate
    """Estimated bytes of the values that bodies are parsed into."""


class CallMemory:
    """Memory reserved by one call."""

    def __init__(self, gates: MemoryGates, tenant_id: str) -> None:
        self.body: Hold = gates.bodies.hold(tenant_id)
        self.work: Hold = gates.work.hold(tenant_id)

    def release(self) -> None:
        self.work.release()
        self.body.release()


def json_work_bytes(data: bytes) -> int:
    """Return an upper bound of the memory of a parsed JSON document whose objects are converted to pydantic models."""
    return 4 * len(data) + 64 * (data.count(b',') + data.count(b'[')) + _MODEL_BYTES * data.count(b'{')


def message_work_bytes(data: bytes) -> int:
    """Return an upper bound of the memory of a parsed protobuf message; an element may take only two encoded bytes."""
    return 40 * len(data)


STATUSES: Mapping[Code, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.DEADLINE_EXCEEDED: 408,
    Code.ABORTED: 409,
    Code.ALREADY_EXISTS: 409,
    Code.CANCELLED: 409,
    Code.FAILED_PRECONDITION: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
}
"""Customary HTTP status of each error code; all other codes return 500."""


class ErrorFormat(Protocol):
    """Builds the error responses of one API."""

    def status_of(self, error: DomainError) -> int:
        """Return the HTTP status for an error."""
        ...

    def body_of(self, error: DomainError, *, request_id: str) -> dict[str, Any]:
        """Return the JSON body for an error."""
        ...


class Response(Protocol):
    """Response to a call."""

    async def write(self, call: HttpCall) -> None:
        """Write head and body to the client."""
        ...


@dataclass(frozen=True, kw_only=True)
class Route:
    """A path and its handler."""

    path: str
    """Starlette path pattern."""
    http_method: str
    name: str
    """Name in logs, metrics and traces, such as `openai.chat.completions`."""
    method: str
    """RPC method, with a leading slash, whose access rules apply."""
    serve: Callable[[HttpCall], Awaitable[Response]]
    errors: ErrorFormat
    credentials: Callable[[Mapping[str, str]], Mapping[str, str]] = dict
    """Maps a call's headers to those that the authenticator reads."""
    identify: Callable[[HttpCall], Awaitable[Caller | None]] | None = None
    """Returns the caller of a call without an API key, or raises an error; None authenticates by the headers. If the
    function returns None, the call is open: it is served without a caller, and open calls share one tenant's limits."""
    write_error: Callable[[HttpCall, DomainError], Awaitable[None]] | None = None
    """Writes an error for clients of a protocol without JSON errors; None writes the body that `errors` builds."""
    error_event: str = ''
    """Name of the event that ends a stream of events with an error; empty for an event without a name."""


@dataclass
class BodyEnds:
    """First and last bytes of a body."""

    head: bytearray = field(default_factory=bytearray)
    tail: bytes = b''

    def add(self, chunk: bytes) -> None:
        self.head.extend(memoryview(chunk)[: HEAD_BYTES - len(self.head)])
        self.tail = (self.tail + chunk[-TAIL_BYTES:])[-TAIL_BYTES:]


@dataclass(eq=False)
class HttpCall:
    """State of one call. Its methods write the response, and reserve memory for the call."""

    route: Route
    scope: Mapping[str, Any]
    receive: Receive
    send: Send
    headers: Mapping[str, str]
    """Names are in lower case."""
    request_id: str = field(default_factory=lambda: new_id('rq'))
    """Id of the call in logs and traces; the client's `x-request-id`, if any, replaces it after authentication."""
    caller: Caller | None = None
    memory: CallMemory | None = None
    """Reserved memory; None until the caller is known."""
    body_ends: BodyEnds = field(default_factory=BodyEnds)
    """First and last bytes of a body that is too long, or of any body that the Tinker API has read; otherwise empty."""
    status: int = 0
    """HTTP status sent to the client; 0 before the head is written."""
    is_streaming: bool = False
    """Whether an error can be written as the last event of a response whose head is written. If it is False, the
    connection is closed instead."""
    body_done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the request body will not be read any further."""
    termination: DomainError | None = None
    """Error with which the server terminated the call early; None if it did not."""
    outcome: str = 'OK'
    """Reason of the failure, or 'OK'."""

    @property
    def path_values(self) -> Mapping[str, str]:
        return self.scope.get('path_params', {})

    async def begin(self, status: int, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        merged = {'content-type': content_type, 'x-request-id': self.request_id, **(headers or {})}
        if not self.body_done.is_set():
            # The unread rest of the body would be parsed as the next request.
            merged['connection'] = 'close'
        pairs = [(name.encode(), value.encode('latin-1', 'replace')) for name, value in merged.items()]
        await self.send({'type': 'http.response.start', 'status': status, 'headers': pairs})

    async def write(self, data: bytes, *, is_last: bool) -> None:
        for begin in range(0, max(len(data), 1), _CHUNK_BYTES):
            end = begin + _CHUNK_BYTES
            has_more = end < len(data) or not is_last
            await self.send({'type': 'http.response.body', 'body': data[begin:end], 'more_body': has_more})

    async def reserve_body(self, size_bytes: int) -> None:
        """Reserve memory for the body, or for a large response, until the call finishes or `release_body` is called.

        Raises:
            BytesFull: the memory did not become free in time.
        """
        if self.memory is not None:
            await self.memory.body.grow(size_bytes)

    def release_body(self) -> None:
        if self.memory is not None:
            self.memory.body.shrink_to(0)

    async def reserve_work(self, size_bytes: int) -> None:
        """Reserve memory for parsed values until the call finishes or `release_work` is called, or raise BytesFull."""
        if self.memory is not None:
            await self.memory.work.grow(size_bytes)

    def release_work(self) -> None:
        if self.memory is not None:
            self.memory.work.shrink_to(0)


@dataclass(frozen=True)
class JsonResponse:
    """Response with a JSON document."""

    body: Mapping[str, Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    async def write(self, call: HttpCall) -> None:
        data = json_bytes(self.body)
        await call.begin(self.status, JSON_TYPE, {'content-length': str(len(data)), **self.headers})
        await call.write(data, is_last=True)


@dataclass(frozen=True)
class EncodedResponse:
    """Response with a document that is already encoded, in parts."""

    parts: Sequence[bytes]
    content_type: str = JSON_TYPE

    async def write(self, call: HttpCall) -> None:
        await call.begin(200, self.content_type, {'content-length': str(sum(map(len, self.parts)))})
        for part in self.parts:
            await call.write(part, is_last=False)
        await call.write(b'', is_last=True)


@dataclass(frozen=True)
class EventResponse:
    """Response with server-sent events, each a JSON document.

    The head is written with the first event, so that an earlier error can set a different status.
    """

    events: AsyncGenerator[Mapping[str, Any], None]
    is_named: bool = False
    """Whether each event has its field `type` as its name. Otherwise, `[DONE]` follows the last event."""

    async def write(self, call: HttpCall) -> None:
        async with aclosing(self.events) as events:
            async for event in events:
                if not call.is_streaming:
                    call.is_streaming = True
                    await call.begin(200, EVENT_TYPE, {'cache-control': 'no-cache', 'x-accel-buffering': 'no'})
                name = event['type'] if self.is_named else ''
                await call.write(event_bytes(event, name=name), is_last=False)
        if not call.is_streaming:
            await call.begin(200, EVENT_TYPE)
        await call.write(b'' if self.is_named else b'data: [DONE]\n\n', is_last=True)


_LINE_ENDS = {ord(end): f'\\u{ord(end):04x}' for end in '\u0085\u2028\u2029'}


def event_bytes(event: Mapping[str, Any], *, name: str = '') -> bytes:
    """Encode one server-sent event, without a name if `name` is empty; characters that may end a line are escaped."""
    text = _json_text(event)
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    head = f'event: {name}\n' if name else ''
    return f'{head}data: {text}\n\n'.encode()


def json_bytes(body: Mapping[str, Any]) -> bytes:
    """Encode a compact JSON document; numbers must be finite."""
    return _json_text(body).encode()


def _json_text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(',', ':'), allow_nan=False)
