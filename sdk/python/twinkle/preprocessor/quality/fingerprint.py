"""Digests of row values, equal for rows with equal content."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from twinkle.preprocessor.errors import InvalidRow

_MAX_DEPTH = 64
"""Maximum nesting depth of a row."""
_SIZE_BYTES = 16


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


class _Incomparable(Exception):
    """A value is an object whose content cannot be read."""


def fingerprint(values: Any) -> bytes | None:
    """Return a 16-byte digest of values, or None if they contain an object whose content cannot be read.

    Whitespace in texts is normalized, and null fields are ignored. Objects with `tobytes`, such as images and arrays,
    are compared by their bytes, mode, size, dtype and shape.

    Raises:
        InvalidRow: the values are nested too deeply.
    """
    digest = hashlib.blake2b(digest_size=_SIZE_BYTES)
    try:
        _feed(digest, values, 0)
    except _Incomparable:
        return None
    return digest.digest()


def _feed(digest: _Hash, value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise InvalidRow('row', f'is nested more than {_MAX_DEPTH} levels deep')
    if isinstance(value, str):
        _put(digest, b's', ' '.join(value.split()).encode('utf-8', 'surrogatepass'))
    elif isinstance(value, bytes | bytearray):
        _put(digest, b'b', bytes(value))
    elif value is None or isinstance(value, bool | int | float):
        _put(digest, b'n', repr(value).encode())
    elif isinstance(value, Mapping):
        _feed_mapping(digest, cast('Mapping[Any, Any]', value), depth)
    elif isinstance(value, Sequence):
        items = cast('Sequence[Any]', value)
        _put(digest, b'l', str(len(items)).encode())
        for item in items:
            _feed(digest, item, depth + 1)
    else:
        _feed_object(digest, value)


def _feed_mapping(digest: _Hash, mapping: Mapping[Any, Any], depth: int) -> None:
    items = sorted(((str(k), v) for k, v in mapping.items() if v is not None), key=lambda item: item[0])
    _put(digest, b'm', str(len(items)).encode())
    for name, item in items:
        _put(digest, b'k', name.encode('utf-8', 'surrogatepass'))
        _feed(digest, item, depth + 1)


def _feed_object(digest: _Hash, value: Any) -> None:
    if not callable(getattr(value, 'tobytes', None)):
        raise _Incomparable
    form = [repr(getattr(value, name, None)) for name in ('mode', 'size', 'dtype', 'shape')]
    _put(digest, b'o', ' '.join(form).encode())
    _put(digest, b'b', value.tobytes())


def _put(digest: _Hash, kind: bytes, content: bytes) -> None:
    digest.update(kind + len(content).to_bytes(8, 'little'))
    digest.update(content)
