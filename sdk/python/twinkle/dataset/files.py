"""Read and write files of rows: JSON lines, JSON, Parquet, CSV and Arrow."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from twinkle.dataset.errors import UnreadableFile
from twinkle.dataset.json_files import rows_of_lines, rows_of_list

Row = dict[str, Any]

FORMATS = ('jsonl', 'json', 'parquet', 'csv', 'arrow')
"""Names of the supported formats, which are also the file suffixes."""

_NOT_JSON = (TypeError, ValueError, RecursionError)
"""Errors for values of other types, text that is not valid Unicode, cycles, and deeply nested values."""


def format_of(path: Path) -> str | None:
    """Return the format of a file according to its suffix, or None if the suffix is not in `FORMATS`."""
    suffix = path.suffix.lstrip('.').lower()
    return suffix if suffix in FORMATS else None


def read_rows(path: Path, file_format: str | None = None) -> Sequence[Row]:
    """Return the rows of a file, in order; the rows of an Arrow file are loaded on access.

    Args:
        path: the file.
        file_format: one of `FORMATS`. Default: the suffix of the path.

    Raises:
        UnreadableFile: the format is unknown, or the file does not have this format.
        DatasetError: two columns have the same name.
    """
    chosen = file_format or format_of(path)
    if chosen not in _READERS:
        raise UnreadableFile(f'{path.name}: the format must be one of {", ".join(FORMATS)}')
    return _READERS[chosen](path)


def iter_rows(path: Path, file_format: str | None = None) -> Iterator[Row]:
    """Yield the rows of a file, reading it in pieces.

    The types of CSV columns are inferred from the first block, not from all rows.

    Args:
        path: the file.
        file_format: one of `FORMATS`. Default: the suffix of the path.

    Raises:
        UnreadableFile, DatasetError: as in `read_rows`; raised during iteration.
    """
    chosen = file_format or format_of(path)
    if chosen not in _STREAMS:
        raise UnreadableFile(f'{path.name}: the format must be one of {", ".join(FORMATS)}')
    yield from _STREAMS[chosen](path)


def write_rows(
    path: Path, rows: Iterable[Mapping[str, Any]], file_format: str | None = None, *, batch_rows: int = 1000
) -> None:
    """Write rows to a file, replacing an existing file atomically.

    Args:
        path: the file; missing folders are created.
        rows: rows whose values are JSON values or numpy arrays.
        file_format: 'jsonl', 'parquet', 'csv' or 'arrow'. Default: the suffix of the path.
        batch_rows: number of rows converted to columns together, in formats with columns. Default: 1000.

    Raises:
        UnreadableFile: the format is unknown, cannot be written, or cannot represent the rows; for example, JSON lines
            cannot represent bytes.
    """
    chosen = refuse_unwritable(path, file_format)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f'.{path.name}.part')
    try:
        _WRITERS[chosen](staging, rows, batch_rows)
        staging.replace(path)
    except BaseException:
        with suppress(OSError):
            staging.unlink()
        raise


def json_line(position: int, row: Mapping[str, Any]) -> str:
    """Return the row at a position as JSON, without a line break.

    Raises:
        UnreadableFile: JSON cannot represent a value, such as bytes; the error names its column.
    """
    try:
        return _json_of(row)
    except _NOT_JSON as error:
        column = next((name for name, value in row.items() if not _is_json({name: value})), '')
        raise UnreadableFile(f'rows[{position}].{column} cannot be written as JSON: {error}') from error


def _json_of(row: Mapping[str, Any]) -> str:
    text = json.dumps(plain(row), ensure_ascii=False)
    text.encode()
    return text


def _is_json(row: Mapping[str, Any]) -> bool:
    try:
        _json_of(row)
    except _NOT_JSON:
        return False
    return True


def refuse_unwritable(path: Path, file_format: str | None) -> str:
    """Return the format in which rows will be written.

    Raises:
        UnreadableFile: the format is unknown or cannot be written.
    """
    chosen = file_format or format_of(path)
    if chosen not in _WRITERS:
        raise UnreadableFile(f'{path.name}: the format of rows to write must be one of {", ".join(_WRITERS)}')
    return chosen


def plain(value: Any) -> Any:
    """Return a value for JSON: numpy arrays and scalars become lists and numbers, and all keys are strings."""
    if isinstance(value, np.ndarray | np.generic):
        return cast('Any', value.tolist())
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in cast('Mapping[Any, Any]', value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast('Sequence[Any]', value)]
    return value


def _read_jsonl(path: Path) -> list[Row]:
    return list(_stream_jsonl(path))


def _stream_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding='utf-8-sig') as file:
        yield from rows_of_lines(path.name, file)


def _read_json(path: Path) -> list[Row]:
    return list(_stream_json(path))


def _stream_json(path: Path) -> Iterator[Row]:
    with path.open(encoding='utf-8-sig') as file:
        yield from rows_of_list(path.name, file)


def _read_parquet(path: Path) -> list[Row]:
    return _arrow_files().read_parquet(path)


def _read_csv(path: Path) -> list[Row]:
    return _arrow_files().read_csv(path)


def _read_arrow(path: Path) -> Sequence[Row]:
    return _arrow_rows().read_arrow(path)


def _stream_arrow(path: Path) -> Iterator[Row]:
    yield from _arrow_rows().stream_arrow(path)


def _stream_parquet(path: Path) -> Iterator[Row]:
    yield from _arrow_files().stream_parquet(path)


def _stream_csv(path: Path) -> Iterator[Row]:
    yield from _arrow_files().stream_csv(path)


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]], _batch_rows: int) -> None:
    with path.open('w', encoding='utf-8') as file:
        for position, row in enumerate(rows):
            file.write(json_line(position, row) + '\n')


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    _arrow_files().write_parquet(path, map(plain, rows), batch_rows)


def _write_csv(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    _arrow_files().write_csv(path, map(plain, rows), batch_rows)


def _write_arrow(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    module = _arrow_rows()
    module.write_arrow(path, rows if isinstance(rows, module.ArrowRows) else map(plain, rows), batch_rows)


def _arrow_rows() -> ModuleType:
    from twinkle.dataset import arrow_rows  # noqa: PLC0415 - see `_arrow_files`

    return arrow_rows


def _arrow_files() -> ModuleType:
    # Imported only for files that need it, because pyarrow takes more memory than the rest of this library.
    from twinkle.dataset import arrow_files  # noqa: PLC0415 - see above

    return arrow_files


_READERS: dict[str, Callable[[Path], Sequence[Row]]] = {
    'jsonl': _read_jsonl,
    'json': _read_json,
    'parquet': _read_parquet,
    'csv': _read_csv,
    'arrow': _read_arrow,
}
_STREAMS: dict[str, Callable[[Path], Iterable[Row]]] = {
    'jsonl': _stream_jsonl,
    'json': _stream_json,
    'parquet': _stream_parquet,
    'csv': _stream_csv,
    'arrow': _stream_arrow,
}
_WRITERS: dict[str, Callable[[Path, Iterable[Mapping[str, Any]], int], None]] = {
    'jsonl': _write_jsonl,
    'parquet': _write_parquet,
    'csv': _write_csv,
    'arrow': _write_arrow,
}
