"""Rows in Arrow tables: read by index without holding them as Python objects, shared with whoever made the table."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast, overload

import pyarrow as pa

from twinkle.dataset.arrow_files import table_of
from twinkle.dataset.errors import UnreadableFile

Row = dict[str, Any]

_BATCH_ROWS = 1000
"""Rows made of a table together where all of them are read."""


class ArrowRows(Sequence[Row]):
    """The rows of a table; each is made when it is read, and changing it changes no table."""

    def __init__(self, table: Any) -> None:
        """Read a `pyarrow.Table`, whose memory is shared."""
        self.table = table

    def __len__(self) -> int:
        return cast('int', self.table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> 'Row | list[Row]':
        if isinstance(index, slice):
            return cast('list[Row]', self.taken(index).table.to_pylist())
        if not -len(self) <= index < len(self):
            raise IndexError(f'row {index} of {len(self)}')
        return cast('Row', self.table.slice(index % len(self), 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Row]:
        begins = range(0, len(self), _BATCH_ROWS)
        return chain.from_iterable(self.table.slice(begin, _BATCH_ROWS).to_pylist() for begin in begins)

    def taken(self, wanted: slice | Sequence[int]) -> 'ArrowRows':
        """Return some of the rows; those that lie together stay where they are in memory."""
        if isinstance(wanted, slice):
            begin, end, step = wanted.indices(len(self))
            if step == 1:
                return ArrowRows(self.table.slice(begin, max(end - begin, 0)))
            wanted = range(begin, end, step)
        return ArrowRows(self.table.take(pa.array(wanted, type=pa.int64())))


def read_arrow(path: Path) -> ArrowRows:
    """Return the rows of an Arrow file, a stream or one with an index, without reading it into memory.

    Raises:
        UnreadableFile: it is none.
    """
    try:
        return ArrowRows(_reader(path).read_all())
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not an Arrow file') from error


def stream_arrow(path: Path) -> Iterator[Row]:
    """Yield the rows of an Arrow file, one batch of its after the other.

    Raises:
        UnreadableFile: it is none.
    """
    yield from read_arrow(path)


def joined(parts: Sequence[ArrowRows]) -> ArrowRows:
    """Return the rows of several tables one after the other, where they are in memory.

    Raises:
        UnreadableFile: they have other columns, or of other types.
    """
    try:
        return ArrowRows(pa.concat_tables([part.table for part in parts]))
    except pa.ArrowException as error:
        raise UnreadableFile(f'the files have other columns, or of other types: {error}') from error


def write_arrow(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    """Write rows as a stream of Arrow batches, which `datasets` reads with `Dataset.from_file`.

    Raises:
        UnreadableFile: rows have no columns, or a column holds values of types that do not go together.
    """
    table = rows.table if isinstance(rows, ArrowRows) else table_of(cast('Iterable[Row]', rows), batch_rows)
    with pa.OSFile(str(path), 'wb') as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)


def _reader(path: Path) -> Any:
    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        return pa.ipc.open_file(source)
