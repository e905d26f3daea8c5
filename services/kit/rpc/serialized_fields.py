"""Reads single fields of serialized messages without parsing the messages.

The gateway uses this module to route requests with batches of many megabytes. Only the headers of a few fields are
read.
"""

from __future__ import annotations

MAX_FIELDS = 256
"""Maximum number of fields to read, so that crafted messages do not block the event loop. Real messages have fewer."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10


class UnreadableMessageError(ValueError):
    """The bytes are not a valid message, or the message has too many fields."""


def peek_text(data: bytes, *path: int) -> str:
    """Return the text field at `path`.

    Args:
        data: Serialized message.
        path: Field numbers from the outermost message to the text; at least one.

    Returns:
        The text; empty if the field is missing. If the field occurs several times, the last text is returned.

    Raises:
        UnreadableMessageError: The message cannot be read.
    """
    return _last_text(memoryview(data), path)


def _last_text(view: memoryview, path: tuple[int, ...]) -> str:
    number, *rest = path
    found = ''
    for value in _values(view, number):
        # Repeated occurrences of an embedded message are merged, so an occurrence without the text changes nothing.
        found = _last_text(value, tuple(rest)) or found if rest else _decoded(value)
    return found


def has_field(data: bytes, number: int) -> bool:
    """Return whether a message has a length-delimited field with that number.

    Raises:
        UnreadableMessageError: The message cannot be read.
    """
    return bool(_values(memoryview(data), number))


def _values(view: memoryview, number: int) -> list[memoryview]:
    """Return the contents of all length-delimited fields with a number."""
    found: list[memoryview] = []
    position = count = 0
    while position < len(view):
        count += 1
        if count > MAX_FIELDS:
            raise UnreadableMessageError('the message has too many fields')
        tag, position = _varint(view, position)
        begin, end = _extent(view, position, tag & 7)
        if tag >> 3 == number and tag & 7 == _BYTES:
            found.append(view[begin:end])
        position = end
    return found


def _extent(view: memoryview, position: int, kind: int) -> tuple[int, int]:
    """Return the begin and end of a field's value."""
    if kind == _VARINT:
        return position, _varint(view, position)[1]
    if kind == _BYTES:
        size, position = _varint(view, position)
    elif kind in _FIXED:
        size = _FIXED[kind]
    else:
        raise UnreadableMessageError(f'unknown wire type {kind}')
    if position + size > len(view):
        raise UnreadableMessageError('the message is truncated')
    return position, position + size


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(view):
            raise UnreadableMessageError('the message is truncated')
        byte = view[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 1 << 7:
            return value, position + index + 1
    raise UnreadableMessageError('a varint has too many bytes')


def _decoded(value: memoryview) -> str:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise UnreadableMessageError('a text is not valid UTF-8') from error
