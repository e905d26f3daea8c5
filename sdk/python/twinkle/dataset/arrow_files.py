"""Read and write Parquet and CSV files with pyarrow."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from twinkle.dataset.arrow_types import refuse_duplicates
from twinkle.dataset.errors import UnreadableFile

Row = dict[str, Any]

_STREAM_ROWS = 1000
"""Number of rows that `stream_parquet` reads at a time."""


def read_parquet(path: Path) -> list[Row]:
    """Return the rows of a Parquet file.

    Raises:
        UnreadableFile: the file is not a Parquet file.
        DatasetError: two columns have the same name.
    """
    try:
        refuse_duplicates(pa_parquet.read_schema(path).names)  # pyarrow does not read columns with the same name
        return _rows_of(pa_parquet.read_table(path))
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not a Parquet file') from error


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a CSV file with a header line; the types of columns are inferred from all rows.

    Raises:
        UnreadableFile: the file is not a CSV file with a header line.
        DatasetError: two columns have the same name.
    """
    options = pa_csv.ParseOptions(newlines_in_values=True)
    try:
        return _rows_of(pa_csv.read_csv(path, parse_options=options))
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not a CSV file with a header line: {error}') from error


def stream_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file, reading 1000 rows at a time.

    Raises:
        UnreadableFile: the file is not a Parquet file.
        DatasetError: two columns have the same name.
    """
    try:
        for batch in pa_parquet.ParquetFile(path).iter_batches(batch_size=_STREAM_ROWS):
            yield from _rows_of(batch)
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not a Parquet file') from error


def stream_csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file block by block; the types of columns are inferred from the first block.

    Raises:
        UnreadableFile: the file is not a CSV file with a header line, or a later row has values of different types.
        DatasetError: two columns have the same name.
    """
    options = pa_csv.ParseOptions(newlines_in_values=True)
    try:
        for batch in pa_csv.open_csv(path, parse_options=options):
            yield from _rows_of(batch)
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not a CSV file with a header line: {error}') from error


def write_parquet(path: Path, rows: Iterable[Row], batch_rows: int) -> None:
    """Write rows as a Parquet file, converting `batch_rows` rows to columns at a time.

    Raises:
        UnreadableFile: the rows have no columns, or a column has values of incompatible types.
    """
    pa_parquet.write_table(table_of(rows, batch_rows), path)


def write_csv(path: Path, rows: Iterable[Row], batch_rows: int) -> None:
    """Write rows as a CSV file with a header line, converting `batch_rows` rows to columns at a time.

    Raises:
        UnreadableFile: as in `write_parquet`, or a column contains lists or objects.
    """
    table = table_of(rows, batch_rows)
    nested = [str(column.name) for column in table.schema if pa.types.is_nested(column.type)]
    if nested:
        raise UnreadableFile(f'columns {nested} contain lists or objects, which CSV cannot represent; use jsonl')
    pa_csv.write_csv(table, path)


def table_of(rows: Iterable[Row], batch_rows: int) -> Any:
    """Return a `pyarrow.Table` of rows, converting `batch_rows` rows at a time to save memory.

    The table has the columns of all rows, in order of first appearance; missing values are null.

    Raises:
        UnreadableFile: the rows have no columns, or a column has values of incompatible types.
    """
    remaining = iter(rows)
    names: dict[str, None] = {}
    pieces: list[Any] = []
    while piece := list(islice(remaining, batch_rows)):
        names |= dict.fromkeys(name for row in piece for name in row)
        if not names:
            raise UnreadableFile('the first rows have no columns; remove them, or use jsonl')
        pieces.append(pa.table({name: _column_of(name, piece) for name in names}))
    try:
        return pa.concat_tables(pieces, promote_options='permissive') if pieces else pa.table({})
    except pa.ArrowException as error:
        problem = f'a column has values of several types: {error}; convert them to one type, or use jsonl'
        raise UnreadableFile(problem) from error


def _rows_of(table: Any) -> list[Row]:
    refuse_duplicates(table.schema.names)
    return cast('list[Row]', table.to_pylist())


def _column_of(name: str, rows: list[Row]) -> Any:
    try:
        return pa.array([row.get(name) for row in rows])
    except (pa.ArrowException, OverflowError) as error:
        problem = f'column {name!r} cannot be written: {error}; convert its values to one type'
        raise UnreadableFile(problem) from error
