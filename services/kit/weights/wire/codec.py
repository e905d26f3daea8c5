"""Chunks of weights between their wire bytes and values, past protobuf, which would copy them.

The bytes are those that the generated code makes: PublishRequest, SubscribeResponse and FetchResponse
all hold a frame in field 1, a frame holds a chunk in field 2, and a chunk is offset, data, checksum.
Written here by hand, a chunk's bytes are copied once when sent and not at all when read. Whatever does
not look so (another frame, unknown or repeated fields, another order) is left to the generated code.
"""

from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.checkpoint_engine import StateChunk

_FRAME = b'\x0a'
_CHUNK = b'\x12'
_OFFSET = 0x08
_DATA = 0x12
_CHECKSUM = 0x18
_BITS = (1 << 64) - 1
_SIGN = 1 << 63
_LONGEST_VARINT = 10


def encode_published(message: StateChunk | wire.PublishRequest) -> bytes:
    """Return the bytes of a frame on its way in."""
    return encode_chunk(message) if isinstance(message, StateChunk) else message.SerializeToString()


def encode_subscribed(message: StateChunk | wire.SubscribeResponse) -> bytes:
    """Return the bytes of a frame, or the news, for a subscriber."""
    return encode_chunk(message) if isinstance(message, StateChunk) else message.SerializeToString()


def encode_fetched(message: StateChunk | wire.FetchResponse) -> bytes:
    """Return the bytes of a frame that was fetched."""
    return encode_chunk(message) if isinstance(message, StateChunk) else message.SerializeToString()


def decode_published(data: bytes) -> StateChunk | wire.PublishRequest:
    """Return a frame on its way in; a chunk's bytes are a view of `data`.

    Raises:
        DecodeError: these are the bytes of no such message.
    """
    chunk = decode_chunk(data)
    return wire.PublishRequest.FromString(data) if chunk is None else chunk


def decode_subscribed(data: bytes) -> StateChunk | wire.SubscribeResponse:
    """Return what a subscriber is told; a chunk's bytes are a view of `data`.

    Raises:
        DecodeError: these are the bytes of no such message.
    """
    chunk = decode_chunk(data)
    return wire.SubscribeResponse.FromString(data) if chunk is None else chunk


def decode_fetched(data: bytes) -> StateChunk | wire.FetchResponse:
    """Return a frame that was fetched; a chunk's bytes are a view of `data`.

    Raises:
        DecodeError: these are the bytes of no such message.
    """
    chunk = decode_chunk(data)
    return wire.FetchResponse.FromString(data) if chunk is None else chunk


def encode_chunk(chunk: StateChunk) -> bytes:
    """Return the bytes of a message that holds `chunk`."""
    head = b''
    if chunk.offset:
        head += b'\x08' + _varint(chunk.offset)
    if len(chunk.data):
        head += b'\x12' + _varint(len(chunk.data))
    tail = b'\x18' + _varint(chunk.checksum) if chunk.checksum else b''
    size = len(head) + len(chunk.data) + len(tail)
    inner = _CHUNK + _varint(size)
    return b''.join((_FRAME, _varint(len(inner) + size), inner, head, chunk.data, tail))


def decode_chunk(data: bytes) -> StateChunk | None:
    """Return the chunk that a message holds, its bytes a view of `data`; None where that cannot be told quickly."""
    try:
        return _decode_chunk(data)
    except (IndexError, ValueError):
        return None


def _decode_chunk(data: bytes) -> StateChunk | None:
    place = _enter(data, 0, _FRAME)
    place = _enter(data, place, _CHUNK)
    end = len(data)
    offset = checksum = 0
    payload = memoryview(b'')
    if place < end and data[place] == _OFFSET:
        offset, place = _read_varint(data, place + 1)
    if place < end and data[place] == _DATA:
        size, begin = _read_varint(data, place + 1)
        place = begin + size
        payload = memoryview(data)[begin:place]
    if place < end and data[place] == _CHECKSUM:
        checksum, place = _read_varint(data, place + 1)
    return StateChunk(_signed(offset), payload, _signed(checksum)) if place == end else None


def _enter(data: bytes, place: int, tag: bytes) -> int:
    """Return where the content of a message begins that reaches to the end of `data`.

    Raises:
        ValueError: there is another field, or something follows it.
    """
    if data[place : place + 1] != tag:
        raise ValueError
    size, begin = _read_varint(data, place + 1)
    if begin + size != len(data):
        raise ValueError
    return begin


def _varint(value: int) -> bytes:
    value &= _BITS
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a number and where the next field begins.

    Raises:
        ValueError: it is longer than any 64-bit number.
        IndexError: the bytes end first.
    """
    value = 0
    for index in range(_LONGEST_VARINT):
        byte = data[place + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & _BITS, place + index + 1
    raise ValueError


def _signed(value: int) -> int:
    return value - (1 << 64) if value & _SIGN else value
