"""Limit on the number of elements of a serialized message, checked before parsing.

Parsing holds the interpreter's lock until it ends, even in a worker thread. An empty submessage takes two bytes on the
wire, but about 100 bytes in memory and 0.4 microseconds to parse. Without this limit, a message of 64 MiB would stop
all calls of the process for 13 seconds and occupy 3.3 GiB. Counting is slower than parsing, but lets other threads run.
"""

import asyncio
from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from twinkle_services.kit.errors import InvalidField

MAX_ELEMENTS = 400_000
"""Maximum number of fields of a message and all its submessages; parsing that many takes about 150 ms."""
_ELEMENT_BYTES = 2
"""Minimum size of an element in bytes; a message that is too short to exceed the limit is not counted."""
_PACKED_BYTES = 4
"""Number of bytes of packed numbers that count as one element."""
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
"""Wire types, see https://protobuf.dev/programming-guides/encoding/."""


async def check_request_elements(message: bytes, method: str) -> None:
    """Check the number of elements of a request, in a worker thread.

    The elements of a request that is too short to exceed the limit are not counted.

    Args:
        message: Serialized request.
        method: Full name of the method, with a leading slash. Requests of unknown methods are not counted.

    Raises:
        InvalidField: The message has too many elements.
    """
    request_type = _request_type(method) if len(message) > _ELEMENT_BYTES * MAX_ELEMENTS else None
    if request_type is not None:
        await asyncio.to_thread(check_elements, message, request_type)


def check_elements(
    message: bytes, message_type: Descriptor, field: str = 'request', *, limit: int = MAX_ELEMENTS
) -> None:
    """Check the number of elements of a serialized message. Damaged bytes raise no error here; the parser refuses them.

    Raises:
        InvalidField: The message has too many elements; the error names `field`.
    """
    if len(message) <= _ELEMENT_BYTES * limit:
        return
    count = 0
    pending: list[tuple[int, int, Descriptor]] = [(0, len(message), message_type)]
    while pending:
        position, end, current = pending.pop()
        known = _fields_of(current)
        while position < end:
            tag, position = _varint(message, position, end)
            begin, position = _value(message, position, end, tag & 7)
            inner = known.get(tag >> 3) if tag & 7 == _DELIMITED else None
            count += 1 if inner is not True else 1 + (position - begin) // _PACKED_BYTES
            if count > limit:
                raise InvalidField(field, f'may have at most {limit} elements; send several smaller messages')
            if isinstance(inner, Descriptor):
                # Read the submessage first and the rest of this message later; the list has one entry for each level.
                pending += [(position, end, current), (begin, min(position, end), inner)]
                break


def _value(message: bytes, position: int, end: int, wire_type: int) -> tuple[int, int]:
    """Return the begin and the end of the value at a position; a value of unknown type extends to the message's end."""
    if wire_type == _DELIMITED:
        size, position = _varint(message, position, end)
        return position, position + size
    if wire_type == _VARINT:
        return position, _varint(message, position, end)[1]
    if wire_type in (_FIXED64, _FIXED32):
        return position, position + (8 if wire_type == _FIXED64 else 4)
    return position, end


def _varint(message: bytes, position: int, end: int) -> tuple[int, int]:
    """Return a varint and the position after it; 0 and the end of the message if the varint is incomplete."""
    value = shift = 0
    while position < end and shift < 70:
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    return 0, end


@lru_cache(maxsize=4096)
def _fields_of(message_type: Descriptor) -> dict[int, Descriptor | bool]:
    """Return, by field number, the type of each submessage, and True for each field whose numbers may be packed."""
    found: dict[int, Descriptor | bool] = {}
    fields: list[Any] = list(message_type.fields)
    for field in fields:
        if field.message_type is not None:
            found[field.number] = field.message_type
        elif field.is_repeated and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            found[field.number] = True
    return found


@lru_cache(maxsize=4096)
def _request_type(method: str) -> Descriptor | None:
    try:
        return descriptor_pool.Default().FindMethodByName(method.removeprefix('/').replace('/', '.')).input_type
    except KeyError:
        return None
