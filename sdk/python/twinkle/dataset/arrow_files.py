"""Parquet and CSV files, through pyarrow."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from twinkle.dataset.errors import UnreadableFile

Row = dict[str, Any]

_PIECE_ROWS = 1000


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


def write_parquet(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as a Parquet file."""
    pa_parquet.write_table(_table_of(rows), path)


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as a CSV file with a header line.

    Raises:
        UnreadableFile: a column holds lists or objects.
    """
    table = _table_of(rows)
    nested = [str(column.name) for column in table.schema if pa.types.is_nested(column.type)]
    if nested:
        raise UnreadableFile(f'columns {nested} hold lists or objects, which CSV cannot; write jsonl or parquet')
    pa_csv.write_csv(table, path)


def _table_of(rows: Iterable[Row]) -> Any:
    """Build a table piece by piece: as Python objects, all rows at once take ten times the memory."""
    remaining = iter(rows)
    pieces: list[Any] = []
    while piece := list(islice(remaining, _PIECE_ROWS)):
        pieces.append(pa.Table.from_pylist(piece))
    return pa.concat_tables(pieces, promote_options='permissive') if pieces else pa.table({})
