"""Memory that the values of Arrow arrays take once they are Python objects."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pa_compute

_COMPUTE: Any = pa_compute  # pyarrow generates these functions when it is imported
_REFERENCE_BYTES = 8
"""Size of a reference to a value; nulls and booleans take no other memory."""
_NUMBER_BYTES = _REFERENCE_BYTES + 32
"""Size of a number."""
_TEXT_BYTES = _REFERENCE_BYTES + 56
"""Size of an empty text."""
_SHORT_TEXT_BYTES = _TEXT_BYTES + 40
"""Size of a date, a time or a decimal, written as text."""
_LIST_BYTES = _REFERENCE_BYTES + 64
"""Size of an empty list."""
_OBJECT_BYTES = _REFERENCE_BYTES + 184
"""Size of an object with up to five fields."""
_FIELD_BYTES = 40
"""Size of each further field of an object."""
_PIECE_BYTES = 4 << 20
"""Maximum size of a piece with several rows."""
_PIECE_ROWS = 1000
"""Maximum number of rows in a piece."""


def pieces_of(batch: Any) -> Iterator[tuple[Any, int]]:
    """Yield consecutive parts of a batch, each with its size as Python objects, in bytes.

    A part with several rows takes at most 4 MiB as Python objects.

    Args:
        batch: a `pyarrow.RecordBatch` with valid arrays.
    """
    for begin in range(0, batch.num_rows, _PIECE_ROWS):
        yield from _halved(batch.slice(begin, _PIECE_ROWS))


def _halved(batch: Any) -> Iterator[tuple[Any, int]]:
    size_bytes = sum(map(size_as_values, batch.columns))
    if batch.num_rows == 1 or size_bytes <= _PIECE_BYTES:
        yield batch, size_bytes
        return
    half = batch.num_rows // 2
    yield from _halved(batch.slice(0, half))
    yield from _halved(batch.slice(half))


def size_as_values(array: Any) -> int:
    """Estimate the memory of an array's values as Python objects, in bytes; repeated values count each time."""
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    size_bytes = len(array) * _value_bytes(kind) + sum(map(size_as_values, parts_of(array)))
    return size_bytes + _length_of_texts(array) if _is_text(kind) else size_bytes


def parts_of(array: Any) -> list[Any]:
    """Return the arrays that contain the values of an array of a nested or extension type; empty for other types."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return [array.storage]
    if pa.types.is_struct(kind):
        return list(array.flatten())
    if pa.types.is_map(kind):
        begin, end = (array.offsets[0].as_py(), array.offsets[-1].as_py()) if len(array) else (0, 0)
        return [array.keys.slice(begin, end - begin), array.items.slice(begin, end - begin)]
    return [array.flatten()] if pa.types.is_nested(kind) else []


def _value_bytes(kind: Any) -> int:
    if pa.types.is_null(kind) or pa.types.is_boolean(kind):
        return _REFERENCE_BYTES
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _NUMBER_BYTES
    if pa.types.is_struct(kind):
        return _OBJECT_BYTES + _FIELD_BYTES * max(kind.num_fields - 5, 0)
    if pa.types.is_map(kind):
        return _OBJECT_BYTES
    if pa.types.is_nested(kind):
        return _LIST_BYTES
    return _TEXT_BYTES if _is_text(kind) else _SHORT_TEXT_BYTES


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _length_of_texts(array: Any) -> int:
    """Return an upper bound on the memory of all characters: one byte each in ASCII strings, four in others."""
    texts = array.dictionary if pa.types.is_dictionary(array.type) else array
    byte_counts = _COMPUTE.binary_length(texts).cast(pa.int64())
    character_counts = _COMPUTE.utf8_length(texts).cast(pa.int64())
    is_ascii = _COMPUTE.equal(byte_counts, character_counts)
    lengths = _COMPUTE.if_else(is_ascii, byte_counts, _COMPUTE.multiply(character_counts, 4))
    return _COMPUTE.sum(lengths if texts is array else lengths.take(array.indices)).as_py() or 0
