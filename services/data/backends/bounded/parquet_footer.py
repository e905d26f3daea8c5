"""Sizes of the columns in a Parquet file, read from its footer.

pyarrow aborts the process when the metadata of a damaged column are read: `RowGroupMetaData.column` does not catch
the exceptions of its C++ library (pyarrow 26). The footer has the fields of
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift, in the encoding of
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twinkle.dataset import UnreadableFile

_TAIL = struct.Struct('<I4s')
"""Layout of the end of a file: the size of the footer, and the magic number."""
_MAGIC = b'PAR1'
"""Last bytes of every Parquet file."""
MAX_FOOTER_BYTES = 16 << 20
"""Maximum size of a footer, which pyarrow reads at once."""
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = range(1, 14)
"""Numbers of the types of values in the compact protocol."""
_FIXED_BYTES = {_TRUE: 0, _FALSE: 0, _BYTE: 1, _DOUBLE: 8, _UUID: 16}
"""Sizes of the values of types with a fixed size."""
_PATH = ((4, _LIST), (1, _LIST), (3, _STRUCT))
"""Fields that lead to the metadata of a column: the groups of rows, their columns, and the metadata."""
_VALUE_COUNT, _SIZE_BYTES = (5, _I64), (6, _I64)
"""Fields of a column's metadata: its number of values and its uncompressed size."""


@dataclass(frozen=True)
class ColumnSize:
    """The declared size of one column in one group of rows."""

    value_count: int
    size_bytes: int
    """Size of all pages once they are decompressed."""


def column_sizes(path: Path) -> list[ColumnSize]:
    """Return the sizes of all columns in all groups of rows.

    Raises:
        UnreadableFile: the file is not a Parquet file, or its footer is damaged or too large.
    """
    try:
        sizes = list(_Footer(_read_footer(path)).columns(_PATH))
    except (LookupError, RecursionError, struct.error) as error:
        raise UnreadableFile(f'{path.name} is not a Parquet file: its footer is damaged') from error
    if any(min(size.value_count, size.size_bytes) < 0 for size in sizes):
        raise UnreadableFile(f'{path.name} is not a Parquet file: a column has a negative size')
    return sizes


def _read_footer(path: Path) -> bytes:
    with path.open('rb') as file:
        end = file.seek(0, os.SEEK_END) - _TAIL.size
        file.seek(max(end, 0))
        size_bytes, magic = _TAIL.unpack(file.read(_TAIL.size))
        if magic != _MAGIC or size_bytes > end:
            raise struct.error
        if size_bytes > MAX_FOOTER_BYTES:
            raise UnreadableFile(
                f'{path.name} has a footer of more than {MAX_FOOTER_BYTES} bytes; use fewer row groups'
            )
        file.seek(end - size_bytes)
        return file.read(size_bytes)


class _Footer:
    """Reads the values of a footer in their order.

    Each method that reads raises LookupError if the data end within a value, or a type is unknown.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def columns(self, path: tuple[tuple[int, int], ...]) -> Iterator[ColumnSize]:
        """Read a struct, and yield the sizes of all columns to which the fields in `path` lead."""
        if not path:
            yield self._column()
            return
        for field, kind in self._fields():
            if (field, kind) != path[0]:
                self._skip(kind)
            elif kind == _STRUCT:
                yield from self.columns(path[1:])
            else:
                yield from self._columns_of_list(path[1:])

    def _columns_of_list(self, path: tuple[tuple[int, int], ...]) -> Iterator[ColumnSize]:
        kind, count = self._list_header()
        for _ in range(count):
            if kind == _STRUCT:
                yield from self.columns(path)
            else:
                self._skip(kind)

    def _column(self) -> ColumnSize:
        numbers: dict[tuple[int, int], int] = {}
        for field, kind in self._fields():
            if (field, kind) in (_VALUE_COUNT, _SIZE_BYTES):
                numbers[field, kind] = self._number()
            else:
                self._skip(kind)
        return ColumnSize(numbers[_VALUE_COUNT], numbers[_SIZE_BYTES])

    def _fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and the type of each field of a struct; the caller reads or skips the value."""
        field = 0
        while header := self._byte():
            field = field + (header >> 4) if header >> 4 else self._number()
            yield field, header & 15

    def _list_header(self) -> tuple[int, int]:
        header = self._byte()
        return header & 15, self._unsigned() if header >> 4 == 15 else header >> 4

    def _skip(self, kind: int) -> None:
        if kind == _STRUCT:
            for _, inner in self._fields():
                self._skip(inner)
        elif kind in (_LIST, _SET):
            inner, count = self._list_header()
            self._skip_items(count, max(inner, _BYTE))  # a truth value is one byte in a list
        elif kind == _MAP:
            if count := self._unsigned():
                kinds = self._byte()
                self._skip_items(count, max(kinds >> 4, _BYTE), max(kinds & 15, _BYTE))
        elif kind == _BINARY:
            size_bytes = self._unsigned()
            self._position += size_bytes
        elif kind in (_I16, _I32, _I64):
            self._unsigned()
        else:
            self._position += _FIXED_BYTES[kind]

    def _skip_items(self, count: int, *kinds: int) -> None:
        for _ in range(count):
            for kind in kinds:
                self._skip(kind)

    def _byte(self) -> int:
        self._position += 1
        return self._data[self._position - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _number(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
