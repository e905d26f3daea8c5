"""Hand-written protobuf encoding of weight chunks, which avoids the copies of the generated code.

The bytes equal those of the generated code. PublishRequest, SubscribeResponse and FetchResponse have a frame in field
1. A frame has a chunk in field 2, and a chunk consists of offset, data and checksum. Sending copies the data once, and
reading does not copy it. Messages of any other form (other frames, unknown or repeated fields, a different order) use
the generated code.
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
_MAX_VARINT_BYTES = 10


def encode_published(message: StateChunk | wire.PublishRequest) -> bytes:
    """Return the bytes of a published frame."""
    return encode_chunk(message) if isinstance(message, StateChunk) else message.SerializeToString()


def encode_subscribed(message: StateChunk | wire.SubscribeResponse) -> bytes:
    """Return the bytes of a message for a subscriber."""
    return encode_chunk(message) if isinstance(message, StateChunk) else message.SerializeToString()


def encode_fetched(message: StateChunk | wire.FetchResponse) -> bytes:
    """Return the bytes of a fetched frame."""
    return encode_chunk(message) if isinstance(message, StateChunk) else message.SerializeToString()


def decode_published(data: bytes) -> StateChunk | wire.PublishRequest:
    """Return a published frame; the data of a chunk is a view of `data`.

    Raises:
        DecodeError: The bytes are not a valid message.
    """
    chunk = decode_chunk(data)
    return wire.PublishRequest.FromString(data) if chunk is None else chunk


def decode_subscribed(data: bytes) -> StateChunk | wire.SubscribeResponse:
    """Return a message for a subscriber; the data of a chunk is a view of `data`.

    Raises:
        DecodeError: The bytes are not a valid message.
    """
    chunk = decode_chunk(data)
    return wire.SubscribeResponse.FromString(data) if chunk is None else chunk


def decode_fetched(data: bytes) -> StateChunk | wire.FetchResponse:
    """Return a fetched frame; the data of a chunk is a view of `data`.

    Raises:
        DecodeError: The bytes are not a valid message.
    """
    chunk = decode_chunk(data)
    return wire.FetchResponse.FromString(data) if chunk is None else chunk


def encode_chunk(chunk: StateChunk) -> bytes:
    """Return the bytes of a message with `chunk`."""
    head = b''
    if chunk.offset:
        head += b'\x08' + _varint(chunk.offset)
    if len(chunk.data):
        head += b'\x12' + _varint(len(chunk.data))
    tail = b'\x18' + _varint(chunk.checksum)
    size = len(head) + len(chunk.data) + len(tail)
    inner = _CHUNK + _varint(size)
    return b''.join((_FRAME, _varint(len(inner) + size), inner, head, chunk.data, tail))


def decode_chunk(data: bytes) -> StateChunk | None:
    """Return the chunk of a message, as a view of `data`; None if the message has a different form."""
    try:
        return _decode_chunk(data)
    except (IndexError, ValueError):
        return None


def _decode_chunk(data: bytes) -> StateChunk | None:
    position = _enter(data, 0, _FRAME)
    position = _enter(data, position, _CHUNK)
    end = len(data)
    offset = checksum = 0
    payload = memoryview(b'')
    if position < end and data[position] == _OFFSET:
        offset, position = _read_varint(data, position + 1)
    if position < end and data[position] == _DATA:
        size, begin = _read_varint(data, position + 1)
        position = begin + size
        payload = memoryview(data)[begin:position]
    if position < end and data[position] == _CHECKSUM:
        checksum, position = _read_varint(data, position + 1)
    return StateChunk(_signed(offset), payload, _signed(checksum)) if position == end else None


def _enter(data: bytes, position: int, tag: bytes) -> int:
    """Return the start of an embedded message that extends to the end of `data`.

    Raises:
        ValueError: A different field is found, or more fields follow.
    """
    if data[position : position + 1] != tag:
        raise ValueError
    size, begin = _read_varint(data, position + 1)
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


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number and the position after it.

    Raises:
        ValueError: The number has more than ten bytes.
        IndexError: The number is incomplete.
    """
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = data[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & _BITS, position + index + 1
    raise ValueError


def _signed(value: int) -> int:
    return value - (1 << 64) if value & _SIGN else value
