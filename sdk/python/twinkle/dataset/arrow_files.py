"""Parquet and CSV files, through pyarrow."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from twinkle.dataset.errors import UnreadableFile

Row = dict[str, Any]

_STREAM_ROWS = 1000


def read_parquet(path: Path) -> list[Row]:
    """Return the rows of a Parquet file.

    Raises:
        UnreadableFile: it is none.
    """
    try:
        return cast('list[Row]', pa_parquet.read_table(path).to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not a Parquet file') from error


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a CSV file with a header line; types of columns are inferred.

    Raises:
        UnreadableFile: it is none.
    """
    options = pa_csv.ParseOptions(newlines_in_values=True)
    try:
        return cast('list[Row]', pa_csv.read_csv(path, parse_options=options).to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not a CSV file with a header line: {error}') from error


def stream_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file, some at a time.

    Raises:
        UnreadableFile: it is none.
    """
    try:
        for batch in pa_parquet.ParquetFile(path).iter_batches(batch_size=_STREAM_ROWS):
            yield from cast('list[Row]', batch.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not a Parquet file') from error


def stream_csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file, some at a time; types of columns are inferred from the first piece.

    Raises:
        UnreadableFile: it is none, or a later row is not of the inferred types.
    """
    options = pa_csv.ParseOptions(newlines_in_values=True)
    try:
        for batch in pa_csv.open_csv(path, parse_options=options):
            yield from cast('list[Row]', batch.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not a CSV file with a header line: {error}') from error


def write_parquet(path: Path, rows: Iterable[Row], batch_rows: int) -> None:
    """Write rows as a Parquet file, turning `batch_rows` into columns at a time.

    Raises:
        UnreadableFile: rows have no columns, or a column holds values of types that do not go together.
    """
    pa_parquet.write_table(table_of(rows, batch_rows), path)


def write_csv(path: Path, rows: Iterable[Row], batch_rows: int) -> None:
    """Write rows as a CSV file with a header line, turning `batch_rows` into columns at a time.

    Raises:
        UnreadableFile: as `write_parquet`, or a column holds lists or objects.
    """
    table = table_of(rows, batch_rows)
    nested = [str(column.name) for column in table.schema if pa.types.is_nested(column.type)]
    if nested:
        raise UnreadableFile(f'columns {nested} hold lists or objects, which CSV cannot; write jsonl or parquet')
    pa_csv.write_csv(table, path)


def table_of(rows: Iterable[Row], batch_rows: int) -> Any:
    """Build a table piece by piece: as Python objects, all rows at once take ten times the memory.

    It has the columns of all rows, in the order they are first met in; a row without one has null there.
    """
    remaining = iter(rows)
    names: dict[str, None] = {}
    pieces: list[Any] = []
    while piece := list(islice(remaining, batch_rows)):
        names |= dict.fromkeys(name for row in piece for name in row)
        if not names:
            raise UnreadableFile('rows[0] and those behind it have no columns; leave them out, or write jsonl')
        pieces.append(pa.table({name: _column_of(name, piece) for name in names}))
    try:
        return pa.concat_tables(pieces, promote_options='permissive') if pieces else pa.table({})
    except pa.ArrowException as error:
        raise UnreadableFile(f'a column has values of several types: {error}; make them one, or write jsonl') from error


def _column_of(name: str, rows: list[Row]) -> Any:
    try:
        return pa.array([row.get(name) for row in rows])
    except (pa.ArrowException, OverflowError) as error:
        raise UnreadableFile(f'column {name!r} cannot be written: {error}; make its values one type') from error
