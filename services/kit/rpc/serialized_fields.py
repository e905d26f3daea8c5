"""Reads one text out of a serialized message, without parsing the rest of it.

A batch of many megabytes is one field of a message with a handful of them: whoever only passes it on reads the
heads of a few fields, and no more.
"""

from __future__ import annotations

MOST_FIELDS = 256
"""Fields of a message that are looked at; ours have fewer, and who sends more does not hold up the event loop."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_MOST_VARINT_BYTES = 10


class UnreadableMessageError(ValueError):
    """The bytes are no message, or one of more fields than are looked at."""


def peek_text(data: bytes, *path: int) -> str:
    """Return the text at `path`: the numbers of fields, from the outermost message to the text.

    Args:
        data: a serialized message.
        path: at least one number.

    Returns:
        The text; empty where it is not there. Of several the last one, as the parser takes it.

    Raises:
        UnreadableMessageError: the message cannot be read; whoever parses it will say why.
    """
    return _last_text(memoryview(data), path)


def _last_text(view: memoryview, path: tuple[int, ...]) -> str:
    number, *rest = path
    found = ''
    for value in _values(view, number):
        # Several of one embedded message are merged: a later one that does not have the text leaves it.
        found = _last_text(value, tuple(rest)) or found if rest else _decoded(value)
    return found


def has_field(data: bytes, number: int) -> bool:
    """Return whether a message has a field of bytes with that number.

    Raises:
        UnreadableMessageError: as `peek_text`.
    """
    return bool(_values(memoryview(data), number))


def _values(view: memoryview, number: int) -> list[memoryview]:
    """Return the contents of all fields of bytes with a number."""
    found: list[memoryview] = []
    position = count = 0
    while position < len(view):
        count += 1
        if count > MOST_FIELDS:
            raise UnreadableMessageError('too many fields')
        tag, position = _varint(view, position)
        begin, end = _extent(view, position, tag & 7)
        if tag >> 3 == number and tag & 7 == _BYTES:
            found.append(view[begin:end])
        position = end
    return found


def _extent(view: memoryview, position: int, kind: int) -> tuple[int, int]:
    """Return where the value of a field begins and ends."""
    if kind == _VARINT:
        return position, _varint(view, position)[1]
    if kind == _BYTES:
        size, position = _varint(view, position)
    elif kind in _FIXED:
        size = _FIXED[kind]
    else:
        raise UnreadableMessageError(f'no kind {kind}')
    if position + size > len(view):
        raise UnreadableMessageError('ends too early')
    return position, position + size


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_MOST_VARINT_BYTES):
        if position + index >= len(view):
            raise UnreadableMessageError('ends too early')
        byte = view[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 1 << 7:
            return value, position + index + 1
    raise UnreadableMessageError('a number is too long')


def _decoded(value: memoryview) -> str:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise UnreadableMessageError('a text is no UTF-8') from error
