"""Read files of untrusted callers: memory is charged before allocation, and files beyond the limits are refused."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

from twinkle.dataset import UnreadableFile
from twinkle.dataset.files import FORMATS, format_of
from twinkle.dataset.row_bounds import Row, RowBounds, bounded_lines, counted
from twinkle_services.data.backends.bounded.json_files import rows_of_lines, rows_of_list


def bounded_rows(path: Path, bounds: RowBounds, file_format: str | None = None) -> Iterator[Row]:
    """Yield the rows of a file in order, and charge each one.

    Args:
        path: the file.
        bounds: limits; bytes that are needed only while a batch is decoded are charged and released again.
        file_format: one of `FORMATS`. Default: the suffix of the path.

    Raises:
        UnreadableFile: the format is unknown, the file does not have this format, or a line or a JSON object is too
            long.
        DatasetError: the file has too many columns, two columns with the same name, or a column of an unsupported type.
        Exception: `bounds` refused the rows.
    """
    chosen = file_format or format_of(path)
    if chosen not in _READERS:
        raise UnreadableFile(f'{path.name}: the format must be one of {", ".join(FORMATS)}')
    with closing(_READERS[chosen](path, bounds)) as rows:
        yield from counted(rows, bounds)


def _jsonl_rows(path: Path, bounds: RowBounds) -> Iterator[Row]:
    with path.open(encoding='utf-8-sig') as file:
        yield from rows_of_lines(path.name, bounded_lines(path.name, file), bounds)


def _json_rows(path: Path, bounds: RowBounds) -> Iterator[Row]:
    with path.open(encoding='utf-8-sig') as file:
        yield from rows_of_list(path.name, file, bounds)


def _parquet_rows(path: Path, bounds: RowBounds) -> Iterator[Row]:
    yield from _arrow().parquet_rows(path, bounds)


def _csv_rows(path: Path, bounds: RowBounds) -> Iterator[Row]:
    yield from _arrow().csv_rows(path, bounds)


def _arrow_rows(path: Path, bounds: RowBounds) -> Iterator[Row]:
    yield from _arrow().arrow_rows(path, bounds)


def _arrow() -> ModuleType:
    # Imported only for files that need it, because pyarrow takes more memory than the rest of this library.
    from twinkle_services.data.backends.bounded import arrow_files  # noqa: PLC0415 - see above

    return arrow_files


_READERS: dict[str, Callable[[Path, RowBounds], Any]] = {
    'jsonl': _jsonl_rows,
    'json': _json_rows,
    'parquet': _parquet_rows,
    'csv': _csv_rows,
    'arrow': _arrow_rows,
}
