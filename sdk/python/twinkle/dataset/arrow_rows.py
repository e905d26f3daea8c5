"""Rows in Arrow tables, which are read by index and converted to Python objects only on access."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast, overload

import pyarrow as pa

from twinkle.dataset.arrow_files import table_of
from twinkle.dataset.arrow_types import refuse_duplicates
from twinkle.dataset.errors import UnreadableFile

Row = dict[str, Any]

_BATCH_ROWS = 1000
"""Number of rows converted together when all rows are read."""


class ArrowRows(Sequence[Row]):
    """The rows of an Arrow table; each access returns a new dict, and changing it does not change the table.

    Args:
        table: a `pyarrow.Table`, which is not copied.
    """

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return cast('int', self.table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> 'Row | list[Row]':
        if isinstance(index, slice):
            return cast('list[Row]', self.select(index).table.to_pylist())
        if not -len(self) <= index < len(self):
            raise IndexError(f'row {index} is out of range for {len(self)} rows')
        return cast('Row', self.table.slice(index % len(self), 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Row]:
        begins = range(0, len(self), _BATCH_ROWS)
        return chain.from_iterable(self.table.slice(begin, _BATCH_ROWS).to_pylist() for begin in begins)

    def select(self, selection: slice | Sequence[int]) -> 'ArrowRows':
        """Return some of the rows; a slice with step 1 shares memory, any other choice is copied."""
        if isinstance(selection, slice):
            begin, end, step = selection.indices(len(self))
            if step == 1:
                return ArrowRows(self.table.slice(begin, max(end - begin, 0)))
            selection = range(begin, end, step)
        return ArrowRows(self.table.take(pa.array(selection, type=pa.int64())))


def read_arrow(path: Path) -> ArrowRows:
    """Return the rows of a memory-mapped Arrow file, in the streaming or in the random access format.

    Raises:
        UnreadableFile: the file is not an Arrow file.
        DatasetError: two columns have the same name.
    """
    try:
        table = _reader(path).read_all()
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not an Arrow file') from error
    refuse_duplicates(table.schema.names)
    return ArrowRows(table)


def stream_arrow(path: Path) -> Iterator[Row]:
    """Yield the rows of a memory-mapped Arrow file, converting 1000 rows at a time.

    Raises:
        UnreadableFile: the file is not an Arrow file.
        DatasetError: two columns have the same name.
    """
    yield from read_arrow(path)


def joined(parts: Sequence[ArrowRows]) -> ArrowRows:
    """Return the concatenated rows of several tables without copying them.

    Raises:
        UnreadableFile: the tables have different columns or types.
    """
    try:
        return ArrowRows(pa.concat_tables([part.table for part in parts]))
    except pa.ArrowException as error:
        raise UnreadableFile(f'the files have different columns or types: {error}') from error


def write_arrow(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    """Write rows in the Arrow streaming format, which `datasets` reads with `Dataset.from_file`.

    Raises:
        UnreadableFile: the rows have no columns, or a column has values of incompatible types.
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
