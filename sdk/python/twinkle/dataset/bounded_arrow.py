"""Read Parquet, CSV and Arrow files within bounds, with pyarrow."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pa_compute
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from twinkle.dataset.arrow_rows import read_arrow
from twinkle.dataset.errors import UnreadableFile
from twinkle.dataset.row_bounds import Row, RowBounds, bounded_lines, held, refuse_columns

_COMPUTE: Any = pa_compute  # pyarrow generates these functions when it is imported
_BATCH_ROWS = 1000
_VALUE_BYTES = 8
"""Memory that each value of a column takes at least."""


def csv_rows(path: Path, bounds: RowBounds) -> Iterator[Row]:
    """Yield the rows of a CSV file; see `bounded_rows`."""
    _check_header(path)
    options = pa_csv.ParseOptions(newlines_in_values=True)
    with held(bounds, _bytes_of_csv_table(path)):
        try:
            table = pa_csv.read_csv(path, parse_options=options)
        except (pa.ArrowException, OSError) as error:
            raise UnreadableFile(f'{path.name} is not a CSV file with a header line: {error}') from error
        refuse_columns(table.num_columns)
        for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
            yield from cast('list[Row]', batch.to_pylist())


def _check_header(path: Path) -> None:
    with path.open(encoding='utf-8-sig', errors='replace', newline='') as file:
        try:
            header = next(csv.reader(bounded_lines(path.name, file)), [])
        except csv.Error as error:
            raise UnreadableFile(f'{path.name} is not a CSV file with a header line: {error}') from error
    refuse_columns(len(header))


def _bytes_of_csv_table(path: Path) -> int:
    """Return an upper bound on the memory of a CSV file's table: its text, and a number or an offset per value."""
    size_bytes = value_count = 0
    with path.open('rb') as file:
        while piece := file.read(1 << 20):
            size_bytes += len(piece)
            value_count += sum(map(piece.count, (b',', b'\n', b'\r')))
    return size_bytes + _VALUE_BYTES * value_count


def parquet_rows(path: Path, bounds: RowBounds) -> Iterator[Row]:
    """Yield the rows of a Parquet file; see `bounded_rows`."""
    try:
        with pa_parquet.ParquetFile(path) as file:
            texts = _check_metadata(file.metadata, bounds)
        # A repeated text stays a dictionary index, so a batch takes little memory until its texts were charged.
        with pa_parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                with held(bounds, sum(map(_text_bytes, batch.columns))):
                    yield from cast('list[Row]', batch.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f'{path.name} is not a Parquet file') from error


def _check_metadata(metadata: Any, bounds: RowBounds) -> list[str]:
    """Refuse a file whose rows take too much memory according to its metadata; return the paths of its text columns."""
    refuse_columns(metadata.num_columns)
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    chunks = [group.column(index) for group in groups for index in range(metadata.num_columns)]
    at_least = sum(max(chunk.total_uncompressed_size, _VALUE_BYTES * chunk.num_values) for chunk in chunks)
    bounds.charge(at_least, metadata.num_rows)
    bounds.charge(-at_least, -metadata.num_rows)
    columns = [metadata.schema.column(index) for index in range(metadata.num_columns)]
    return [column.path for column in columns if column.physical_type == 'BYTE_ARRAY']


def _text_bytes(array: Any) -> int:
    """Return the memory that the texts of an array take once repeated ones are separate."""
    if pa.types.is_dictionary(array.type):
        lengths = _COMPUTE.binary_length(array.dictionary).cast(pa.int64())
        return _COMPUTE.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_struct(array.type) or pa.types.is_map(array.type):
        parts = (array.keys, array.items) if pa.types.is_map(array.type) else array.flatten()
        return sum(map(_text_bytes, parts))
    if pa.types.is_nested(array.type):
        return _text_bytes(array.flatten())
    return array.nbytes


def arrow_rows(path: Path, bounds: RowBounds) -> Iterator[Row]:
    """Yield the rows of an Arrow file; see `bounded_rows`."""
    with held(bounds, path.stat().st_size):
        yield from read_arrow(path)
