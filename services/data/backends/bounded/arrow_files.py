"""Read Parquet, CSV and Arrow files within bounds, with pyarrow."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import csv
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from twinkle.dataset import UnreadableFile
from twinkle.dataset.row_bounds import Row, RowBounds, bounded_lines, held, refuse_columns
from twinkle_services.data.backends.bounded.arrow_messages import batch_sizes
from twinkle_services.data.backends.bounded.arrow_sizes import pieces_of
from twinkle_services.data.backends.bounded.arrow_types import json_types, refuse_duplicates
from twinkle_services.data.backends.bounded.arrow_values import check_values, rows_of
from twinkle_services.data.backends.bounded.parquet_footer import column_sizes

_BATCH_ROWS = 1000
"""Maximum number of rows of a CSV or Parquet file in a batch."""
_VALUE_BYTES = 8
"""Minimum memory of each value of a column."""
_FILE_MAGIC = b'ARROW1\0\0'
"""First bytes of an Arrow file with random access; an Arrow stream follows."""


def csv_rows(path: Path, bounds: RowBounds) -> Iterator[Row]:
    """Yield the rows of a CSV file; dates and times stay strings. See `bounded_rows`."""
    _check_header(path)
    with held(bounds, _bytes_of_csv_table(path)), _readable(path, 'a CSV file with a header line'):
        table = _csv_table(path, {})
        dates = {field.name: pa.string() for field in table.schema if pa.types.is_temporal(field.type)}
        if dates:
            table = _csv_table(path, dates)
        for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
            yield from _rows_of(batch, json_types(table.schema), bounds)


def _csv_table(path: Path, types: dict[str, Any]) -> Any:
    parsing = pa_csv.ParseOptions(newlines_in_values=True)
    return pa_csv.read_csv(path, parse_options=parsing, convert_options=pa_csv.ConvertOptions(column_types=types))


def _check_header(path: Path) -> None:
    with path.open(encoding='utf-8-sig', errors='replace', newline='') as file:
        try:
            header = next(csv.reader(bounded_lines(path.name, file)), [])
        except csv.Error as error:
            raise UnreadableFile(f'{path.name} is not a CSV file with a header line: {error}') from error
    refuse_columns(len(header))
    refuse_duplicates(header)


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
    sizes = column_sizes(path)
    at_least = sum(max(size.size_bytes, _VALUE_BYTES * size.value_count) for size in sizes)
    with _readable(path, 'a Parquet file'):
        with pa_parquet.ParquetFile(path) as file:
            _check_metadata(file.metadata, at_least, bounds)
            json_types(file.schema_arrow)
            texts = _text_columns(file.metadata)
        # A repeated string stays a dictionary index, so a batch takes little memory until its strings are charged.
        with pa_parquet.ParquetFile(path, read_dictionary=texts) as file:
            types = json_types(file.schema_arrow)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                yield from _rows_of(batch, types, bounds)


def _check_metadata(metadata: Any, size_bytes: int, bounds: RowBounds) -> None:
    """Refuse a file that exceeds a limit according to its metadata."""
    refuse_columns(metadata.num_columns)
    bounds.charge(size_bytes, metadata.num_rows)
    bounds.charge(-size_bytes, -metadata.num_rows)


def _text_columns(metadata: Any) -> list[str]:
    """Return the paths of the columns that contain strings or bytes."""
    columns = [metadata.schema.column(index) for index in range(metadata.num_columns)]
    return [column.path for column in columns if column.physical_type == 'BYTE_ARRAY']


def arrow_rows(path: Path, bounds: RowBounds) -> Iterator[Row]:
    """Yield the rows of an Arrow file, decoding one batch at a time; see `bounded_rows`."""
    with _readable(path, 'an Arrow file'), pa.memory_map(str(path)) as file, ExitStack() as dictionaries:
        stream, batch_count = _stream_in(file)
        reader = pa.ipc.open_stream(stream, options=pa.ipc.IpcReadOptions(use_threads=False))
        refuse_columns(len(reader.schema))
        types = json_types(reader.schema)
        for size in batch_sizes(stream):
            decoding = held(bounds, max(size.size_bytes, _VALUE_BYTES * size.value_count))
            if size.is_dictionary:
                dictionaries.enter_context(decoding)
                continue
            bounds.charge(0, size.row_count)
            bounds.charge(0, -size.row_count)
            with decoding:
                yield from _rows_of(reader.read_next_batch(), types, bounds)
            batch_count -= 1
        if batch_count > 0:
            raise UnreadableFile(f'{path.name} is not a complete Arrow file: {batch_count} batches are missing')


def _stream_in(file: Any) -> tuple[Any, int]:
    """Return the stream in an Arrow file, and its minimum number of batches."""
    content = file.read_buffer()
    if content.slice(0, len(_FILE_MAGIC)).to_pybytes() != _FILE_MAGIC:
        return content, 0
    return content.slice(len(_FILE_MAGIC)), pa.ipc.open_file(content).num_record_batches


def _rows_of(batch: Any, types: tuple[Any, Any], bounds: RowBounds) -> Iterator[Row]:
    """Yield the rows of a batch as JSON values; the memory of the rows is charged while they are converted."""
    check_values(batch)
    for piece, size_bytes in pieces_of(batch):
        with held(bounds, size_bytes):
            yield from rows_of(piece, types)


@contextmanager
def _readable(path: Path, kind: str) -> Generator[None]:
    """Convert the errors of a malformed file to `UnreadableFile`; disk errors are raised unchanged."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise UnreadableFile(f'{path.name} is not {kind}: {error}') from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise UnreadableFile(f'{path.name} is not {kind}: {error}') from error
