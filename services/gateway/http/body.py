"""Reads request bodies and parses JSON strictly, within limits of size and time."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from twinkle_services.gateway.http.call import JSON_TYPE, HttpCall, json_work_bytes
from twinkle_services.gateway.http.validation import is_shallow
from twinkle_services.kit.errors import BytesFull, DeadlinePassed, InvalidField, MessageTooLarge

INLINE_BYTES = 1 << 14
"""Longer bodies are parsed in a worker thread, because parsing 64 KiB of tokens takes about 5 ms."""
_LONG_CHARACTERS = 1 << 20
"""Parsing longer documents calls a Python function for each integer, which takes three times as long. Without these
calls, the parser would not release the interpreter's lock, and 64 MiB of integers would block other calls for 2 s."""
_MAX_CHARACTERS = {'[': 500_000, '{': 500_000, '"': 2_000_000}
"""Maximum counts of the characters that begin lists, objects and strings, because parsing them holds the same lock."""
_MAX_DEPTH = 500
"""Maximum depth of lists and objects, with the body itself as the first level. The parser of Python 3.14 accepts values
that are too deep for recursive functions in Python; that of Python 3.11 refuses them with a RecursionError."""
_TOO_DEEP = f'may be nested at most {_MAX_DEPTH} levels deep'
_DISCARDED_BYTES = 8 << 20
"""Maximum bytes to read and discard of a body for which memory is lacking; a longer body closes the connection."""

Parsed = TypeVar('Parsed')


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Minimum speed at which a body must arrive; a slow sender would hold memory that other calls wait for."""

    seconds: float = 60.0
    """Maximum number of seconds for the complete body."""
    grace_seconds: float = 10.0
    """Time before the minimum speed applies."""
    slowest_bytes: int = 1 << 14
    """Bytes per second required after the grace period."""

    def allowed_seconds(self, size_bytes: int) -> float:
        """Return the seconds within which more than `size_bytes` must have arrived."""
        return min(self.seconds, self.grace_seconds + size_bytes / self.slowest_bytes)


PACE = Pace()


class ClientDisconnected(Exception):
    """The client closed the connection."""


async def read_json(
    call: HttpCall, make: Callable[[dict[str, Any]], Parsed], *, limit_bytes: int, pace: Pace = PACE
) -> Parsed:
    """Apply `make` to the JSON object in the body; long bodies are parsed in a worker thread.

    Raises:
        InvalidField: the content type, the compression or the JSON is not accepted, or `make` refuses the object.
        MessageTooLarge, BytesFull, DeadlinePassed, ClientDisconnected: see `read_bytes`.
    """
    kind = call.headers.get('content-type', JSON_TYPE).partition(';')[0].strip().lower()
    if kind != JSON_TYPE:
        raise InvalidField('content-type', f'must be {JSON_TYPE}, got {kind[:80]!r}')
    if call.headers.get('content-encoding', 'identity').lower() != 'identity':
        raise InvalidField('content-encoding', 'must be absent; compressed bodies are not supported here')
    data = await read_bytes(call, limit_bytes=limit_bytes, pace=pace)
    await call.reserve_work(json_work_bytes(data))
    try:
        if len(data) > INLINE_BYTES:
            return await asyncio.to_thread(lambda: make(parse_object(data)))
        return make(parse_object(data))
    finally:
        call.release_work()


async def read_bytes(call: HttpCall, *, limit_bytes: int, pace: Pace = PACE) -> bytes:
    """Return the body unchanged.

    Raises:
        MessageTooLarge: the body is longer than `limit_bytes`. `call.body_ends` then contains the first and last bytes
            that were read. A body whose declared length is more than twice the limit is not read.
        BytesFull: the tenant, or all tenants together, have too many bytes in progress.
        DeadlinePassed: the body did not arrive in time.
        ClientDisconnected: the client closed the connection.
    """
    declared = int(call.headers.get('content-length', '0'))
    if declared > 2 * limit_bytes:
        raise MessageTooLarge(size_bytes=declared, limit_bytes=limit_bytes)
    # Many clients read the response only after they have sent the complete body. A refused body is therefore read to
    # its end and discarded, unless it is too long.
    refusal = await _reserve(call, declared) if declared <= limit_bytes else None
    if refusal is not None and declared > _DISCARDED_BYTES:
        raise refusal
    chunks: list[bytes] = []
    size = 0
    async for chunk in read_chunks(call, pace):
        if refusal is not None and size > _DISCARDED_BYTES:
            raise refusal
        size += len(chunk)
        if size > 2 * limit_bytes:
            _store_ends(call, [*chunks, chunk])
            raise MessageTooLarge(size_bytes=max(size, declared), limit_bytes=limit_bytes)
        if refusal is None and declared < size <= limit_bytes:
            refusal = await _reserve(call, len(chunk))
        chunks.append(chunk)
        if max(size, declared) > limit_bytes:
            _store_ends(call, chunks)
        if refusal is not None or max(size, declared) > limit_bytes:
            chunks.clear()
    call.body_done.set()
    if size > limit_bytes:
        raise MessageTooLarge(size_bytes=max(size, declared), limit_bytes=limit_bytes)
    if refusal is not None:
        raise refusal
    return b''.join(chunks)


def _store_ends(call: HttpCall, chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        call.body_ends.add(chunk)


async def _reserve(call: HttpCall, size_bytes: int) -> BytesFull | None:
    """Reserve memory for body bytes. If it is not available, release the call's body memory and return the error."""
    try:
        await call.reserve_body(size_bytes)
    except BytesFull as error:
        call.release_body()
        return error
    return None


async def read_chunks(call: HttpCall, pace: Pace = PACE) -> AsyncIterator[bytes]:
    """Yield the chunks of the body as they arrive; the caller must limit their total size.

    Only the time spent waiting for the client counts against `pace`, not the time that the caller takes.

    Raises:
        DeadlinePassed: the body arrives too slowly.
        ClientDisconnected: the client closed the connection.
    """
    size, spent, has_more = 0, 0.0, True
    clock = asyncio.get_running_loop().time
    while has_more:
        begin = clock()
        try:
            async with asyncio.timeout(pace.allowed_seconds(size) - spent):
                message = await call.receive()
        except TimeoutError as error:
            raise DeadlinePassed() from error
        spent += clock() - begin
        if message['type'] == 'http.disconnect':
            raise ClientDisconnected()
        chunk: bytes = message.get('body', b'')
        size += len(chunk)
        has_more = message.get('more_body', False)
        yield chunk


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly.

    Raises:
        InvalidField: the bytes are not UTF-8 or not a JSON object, a name occurs twice, a number is not finite, a
            surrogate is unpaired, the nesting is deeper than 500 levels, or there are too many lists, objects or
            strings.
    """
    for character, limit in _MAX_CHARACTERS.items():
        if data.count(character.encode()) > limit:
            raise InvalidField('body', f'may have the character {character} at most {limit} times')
    try:
        text = data.decode()
        value = json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_constant=_no_constant,
            parse_float=_finite_number,
            parse_int=_integer if len(text) > _LONG_CHARACTERS else None,
        )
        if '\\u' in text:
            # Escapes can spell unpaired surrogates, which cannot be encoded.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise InvalidField('body', 'must be UTF-8 without unpaired surrogates') from error
    except RecursionError as error:
        raise InvalidField('body', _TOO_DEEP) from error
    except ValueError as error:
        raise InvalidField('body', 'must be JSON') from error
    if data.count(b'[') + data.count(b'{') > _MAX_DEPTH and not is_shallow(value, _MAX_DEPTH):
        raise InvalidField('body', _TOO_DEEP)
    if not isinstance(value, dict):
        raise InvalidField('body', 'must be a JSON object')
    return value  # pyright: ignore[reportUnknownVariableType]


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            # An unpaired surrogate in the name could not be encoded in the error response.
            raise InvalidField(name[:100].encode(errors='replace').decode(), 'occurs twice')
        values[name] = value
    return values


def _no_constant(name: str) -> NoReturn:
    raise InvalidField('body', f'{name} is not a JSON number')


def _integer(text: str) -> int:
    return int(text)


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidField('body', 'has a number that is too large')
    return number
