"""Reads the bodies of Tinker's clients: JSON or protobuf, as they are or compressed, always bounded.

Clients add fields from version to version, so what a route does not know is passed over.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import zstandard

from services.gateway.http.body import parse_object, read_bytes
from services.gateway.http.call import JSON_TYPE, HttpCall, json_work_bytes, message_work_bytes
from services.kit.errors import InvalidField, MessageTooLarge

PROTOBUF_TYPE = 'application/x-protobuf'
JSON_LIMIT_BYTES = 4 << 20
"""Of bodies that hold no examples."""
_AT_ONCE_BYTES = 1 << 14
"""Longer bodies are read beside the event loop."""
_PIECE_BYTES = 1 << 20
_SLICE_BYTES = 1 << 8
"""Of a compressed body that are read at a time: at most some MiB come of them."""
_WINDOW_BYTES = 1 << 27
"""Most memory that a compressed body may ask its reader to keep beside the body."""

Made = TypeVar('Made')


async def read_body(
    call: HttpCall, make: Callable[[dict[str, Any]], Made], *, limit_bytes: int = JSON_LIMIT_BYTES
) -> Made:
    """Return what `make` makes of the JSON object that is the body; an empty body is an empty object.

    Raises:
        MessageTooLarge: it is longer than `limit_bytes`, sent or decompressed.
        InvalidField: it is no JSON object, or one that `make` refuses.
        DeadlinePassed, ClientGone: it did not come.
    """
    if is_protobuf(call):
        raise InvalidField('content-type', f'must be {JSON_TYPE}')
    return await read_message(call, lambda data: make(parse_object(data or b'{}')), limit_bytes=limit_bytes)


async def read_message(call: HttpCall, make: Callable[[bytes], Made], *, limit_bytes: int) -> Made:
    """Return what `make` makes of the body, decompressed; long ones are made beside the event loop.

    Raises:
        MessageTooLarge: it is longer than `limit_bytes`, sent or decompressed.
        InvalidField: it is compressed in a way that is not known, or `make` refuses it.
        DeadlinePassed, ClientGone: it did not come.
    """
    encoding = call.headers.get('content-encoding', 'identity').strip().lower()
    if encoding not in {'identity', 'zstd'}:
        raise InvalidField('content-encoding', 'must be zstd, or absent')
    data = await read_bytes(call, limit_bytes=limit_bytes)
    if encoding == 'zstd':
        data = await _unpacked(call, data, limit_bytes)
    await call.reserve_work(message_work_bytes(data) if is_protobuf(call) else json_work_bytes(data))
    return await asyncio.to_thread(make, data) if len(data) > _AT_ONCE_BYTES else make(data)


def is_protobuf(call: HttpCall) -> bool:
    """Return whether the body is said to be protobuf."""
    return _media_type(call.headers.get('content-type', '')) == PROTOBUF_TYPE


def wants_protobuf(call: HttpCall) -> bool:
    """Return whether the client takes an answer in protobuf."""
    return any(_media_type(part) == PROTOBUF_TYPE for part in call.headers.get('accept', '').split(','))


async def _unpacked(call: HttpCall, data: bytes, limit_bytes: int) -> bytes:
    """Return a body decompressed, beside the event loop; each piece is counted as it comes."""
    await call.reserve_work(_window_bytes(data))
    pieces = plain_pieces(data, limit_bytes=limit_bytes)
    found: list[bytes] = []
    while piece := await asyncio.to_thread(next, pieces, b''):
        await call.reserve_body(len(piece))
        found.append(piece)
    call.release_work()
    return b''.join(found)


def decompressed(data: bytes, *, limit_bytes: int) -> bytes:
    """Return one zstd frame as it was.

    Raises:
        MessageTooLarge, InvalidField: as `plain_pieces`.
    """
    return b''.join(plain_pieces(data, limit_bytes=limit_bytes))


def plain_pieces(data: bytes, *, limit_bytes: int) -> Iterator[bytes]:
    """Yield one zstd frame as it was, in pieces of a few MiB, none of them empty.

    Raises:
        MessageTooLarge: it is longer; little more than `limit_bytes` is made of it.
        InvalidField: it is not zstd, or is cut off.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared > limit_bytes:
            raise MessageTooLarge(size_bytes=declared, limit_bytes=limit_bytes)
        frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
        yield from _gathered(_slices(frame, data), limit_bytes)
    except zstandard.ZstdError as error:
        raise InvalidField('body', 'must be zstd, as content-encoding says') from error
    if not frame.eof:
        raise InvalidField('body', 'is cut off')


def _slices(frame: Any, data: bytes) -> Iterator[bytes]:
    """Yield what comes of a few bytes at a time: a block of 128 KiB may have as few as four."""
    for begin in range(0, len(data), _SLICE_BYTES):
        yield frame.decompress(data[begin : begin + _SLICE_BYTES])
        if frame.eof:
            return


def _gathered(slices: Iterable[bytes], limit_bytes: int) -> Iterator[bytes]:
    found: list[bytes] = []
    size_bytes = waiting_bytes = 0
    for piece in slices:
        found.append(piece)
        size_bytes += len(piece)
        waiting_bytes += len(piece)
        if size_bytes > limit_bytes:
            raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=limit_bytes)
        if waiting_bytes >= _PIECE_BYTES:
            yield b''.join(found)
            found, waiting_bytes = [], 0
    if waiting_bytes:
        yield b''.join(found)


def _window_bytes(data: bytes) -> int:
    """Return what a reader of a frame keeps beside it; 0 where it is none."""
    try:
        return min(zstandard.get_frame_parameters(data).window_size, _WINDOW_BYTES)
    except zstandard.ZstdError:
        return 0


def _media_type(text: str) -> str:
    return text.partition(';')[0].strip().lower()
