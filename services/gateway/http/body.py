"""Reads JSON that a stranger sent: bounded in size and time, and with one meaning only."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from services.gateway.http.call import HttpCall
from services.gateway.http.memory import json_work_bytes
from services.kit.errors import BytesFull, DeadlinePassed, InvalidField, MessageTooLarge

_AT_ONCE_BYTES = 1 << 14
"""Longer bodies are read beside the event loop: of tokens, 64 KiB take about 5 ms."""
_DISCARDED_BYTES = 8 << 20
"""Of a body for which there is no room: batches of the SDKs have less. Longer ones are cut off."""

Made = TypeVar('Made')


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a body has to come: whoever sends slower holds memory that others wait for."""

    seconds: float = 60.0
    """How long it may take."""
    grace_seconds: float = 10.0
    slowest_bytes: int = 1 << 14
    """A second, after the grace."""

    def allowed_seconds(self, size_bytes: int) -> float:
        """Return how long it may take until more than `size_bytes` have come."""
        return min(self.seconds, self.grace_seconds + size_bytes / self.slowest_bytes)


PACE = Pace()


class ClientGone(Exception):
    """The client closed the connection; nobody is left to be answered."""


async def read_json(
    call: HttpCall, make: Callable[[dict[str, Any]], Made], *, limit_bytes: int, pace: Pace = PACE
) -> Made:
    """Return what `make` makes of the object that is the body of the call; long ones are made beside the event loop.

    Raises:
        MessageTooLarge: it is longer than `limit_bytes`; of what is too long at most as much is read.
        DeadlinePassed: it did not arrive in time.
        InvalidField: it is no JSON object, one that readers may differ about, or one that `make` refuses.
        ClientGone: the client left meanwhile.
    """
    kind = call.headers.get('content-type', 'application/json').partition(';')[0].strip().lower()
    if kind != 'application/json':
        raise InvalidField('content-type', 'must be application/json')
    if call.headers.get('content-encoding', 'identity').lower() != 'identity':
        raise InvalidField('content-encoding', 'must be absent; bodies are read as they are')
    data = await read_bytes(call, limit_bytes=limit_bytes, pace=pace)
    await call.take_work(json_work_bytes(data))
    try:
        if len(data) > _AT_ONCE_BYTES:
            return await asyncio.to_thread(lambda: make(parse_object(data)))
        return make(parse_object(data))
    finally:
        call.drop_work()


async def read_bytes(call: HttpCall, *, limit_bytes: int, pace: Pace = PACE) -> bytes:
    """Return the body of the call as it came.

    Raises:
        MessageTooLarge: it is longer than `limit_bytes`; of what is too long at most twice as much is read.
        BytesFull: its tenant, or all, have too much under way.
        DeadlinePassed: it did not arrive in time.
        ClientGone: the client left meanwhile.
    """
    declared = int(call.headers.get('content-length', '0'))
    if declared > 2 * limit_bytes:
        raise MessageTooLarge(size_bytes=declared, limit_bytes=limit_bytes)
    # What is refused is read to its end all the same, and kept nowhere, unless it is long: many clients read no
    # answer before they have sent all.
    refusal = await _refusal_of(call, declared) if declared <= limit_bytes else None
    if refusal is not None and declared > _DISCARDED_BYTES:
        raise refusal
    chunks: list[bytes] = []
    size = 0
    async for piece in arriving(call, pace):
        if refusal is not None and size > _DISCARDED_BYTES:
            raise refusal
        size += len(piece)
        if size > 2 * limit_bytes:
            raise MessageTooLarge(size_bytes=max(size, declared), limit_bytes=limit_bytes)
        if refusal is None and declared < size <= limit_bytes:
            refusal = await _refusal_of(call, len(piece))
        if refusal is not None or size > limit_bytes:
            chunks.clear()
        else:
            chunks.append(piece)
    call.body_done.set()
    if size > limit_bytes:
        raise MessageTooLarge(size_bytes=max(size, declared), limit_bytes=limit_bytes)
    if refusal is not None:
        raise refusal
    return b''.join(chunks)


async def _refusal_of(call: HttpCall, size_bytes: int) -> BytesFull | None:
    """Take room for some bytes; return why there is none."""
    try:
        await call.take_body(size_bytes)
    except BytesFull as error:
        call.drop_body()
        return error
    return None


async def arriving(call: HttpCall, pace: Pace = PACE) -> AsyncIterator[bytes]:
    """Yield the body as it comes; whoever reads it has to bound it.

    Time counts while it is waited for, and not while it is worked on.

    Raises:
        DeadlinePassed: it comes too slowly.
        ClientGone: the client left meanwhile.
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
            raise ClientGone()
        piece: bytes = message.get('body', b'')
        size += len(piece)
        has_more = message.get('more_body', False)
        yield piece


def parse_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object of bytes.

    Raises:
        InvalidField: it is not UTF-8 or no JSON object, a name comes twice, a number is not finite, a character
            is half of one, or it is nested too deep.
    """
    try:
        text = data.decode()
        value = json.loads(
            text, object_pairs_hook=_unique_names, parse_constant=_no_constant, parse_float=_finite_number
        )
        if '\\u' in text:
            # Escapes can spell halves of characters, which no text may hold.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise InvalidField('body', 'must be UTF-8, with whole characters only') from error
    except RecursionError as error:
        raise InvalidField('body', 'is nested too deep') from error
    except ValueError as error:
        raise InvalidField('body', 'must be JSON') from error
    if not isinstance(value, dict):
        raise InvalidField('body', 'must be a JSON object')
    return value  # pyright: ignore[reportUnknownVariableType]


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            # Half a character, which only escapes can spell, could not be told.
            raise InvalidField(name[:100].encode(errors='replace').decode(), 'is given twice')
        values[name] = value
    return values


def _no_constant(name: str) -> NoReturn:
    raise InvalidField('body', f'{name} is no JSON number')


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidField('body', 'has a number that is too large')
    return number
