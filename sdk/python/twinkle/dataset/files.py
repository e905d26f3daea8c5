"""Rows in files: JSON lines, JSON, Parquet, CSV."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from twinkle.dataset.errors import UnreadableFile

Row = dict[str, Any]

FORMATS = ('jsonl', 'json', 'parquet', 'csv', 'arrow')
"""Formats by name; also the suffixes of their files."""


def format_of(path: Path) -> str | None:
    """Return the format a file's suffix says, None if it is none of `FORMATS`."""
    suffix = path.suffix.lstrip('.').lower()
    return suffix if suffix in FORMATS else None


def read_rows(path: Path, file_format: str | None = None) -> Sequence[Row]:
    """Return the rows of a file; those of an Arrow file stay there until they are read.

    Args:
        file_format: one of `FORMATS`. Unset: what the suffix says.

    Raises:
        UnreadableFile: the format is unknown, or the file does not hold it.
    """
    chosen = file_format or format_of(path)
    if chosen not in _READERS:
        raise UnreadableFile(f'{path.name}: a file of rows must be one of {", ".join(FORMATS)}')
    return _READERS[chosen](path)


def iter_rows(path: Path, file_format: str | None = None) -> Iterator[Row]:
    """Yield the rows of a file, reading it piece by piece (a JSON list is read whole).

    In CSV the types of columns are inferred from the first piece, not from all rows.

    Args:
        file_format: as of `read_rows`.

    Raises:
        UnreadableFile: as `read_rows`, once iterated.
    """
    chosen = file_format or format_of(path)
    if chosen not in _STREAMS:
        raise UnreadableFile(f'{path.name}: a file of rows must be one of {", ".join(FORMATS)}')
    yield from _STREAMS[chosen](path)


def write_rows(
    path: Path, rows: Iterable[Mapping[str, Any]], file_format: str | None = None, *, batch_rows: int = 1000
) -> None:
    """Write rows to a file, replacing it in one step.

    Args:
        file_format: 'jsonl', 'parquet', 'csv' or 'arrow'. Unset: what the suffix says.
        batch_rows: rows turned into columns together, where the format has columns.

    Raises:
        UnreadableFile: the format is unknown or cannot be written.
    """
    chosen = refuse_unwritable(path, file_format)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f'.{path.name}.part')
    _WRITERS[chosen](staging, rows, batch_rows)
    staging.replace(path)


def refuse_unwritable(path: Path, file_format: str | None) -> str:
    """Return the format that rows are written in.

    Raises:
        UnreadableFile: it is unknown or cannot be written.
    """
    chosen = file_format or format_of(path)
    if chosen not in _WRITERS:
        raise UnreadableFile(f'{path.name}: rows can be written as {", ".join(_WRITERS)}')
    return chosen


def plain(value: Any) -> Any:
    """Return a value with its arrays as lists, as JSON needs it."""
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
        yield from _rows_of_lines(path.name, file)


def _rows_of_lines(name: str, lines: Iterable[str]) -> Iterator[Row]:
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _checked(_parse(line, f'{name}, line {number}'), f'{name}, line {number}')
    except UnicodeDecodeError as error:
        raise UnreadableFile(f'{name} is not UTF-8 text') from error


def _read_json(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding='utf-8-sig')
    except UnicodeDecodeError as error:
        raise UnreadableFile(f'{path.name} is not UTF-8 text') from error
    content = _parse(text, path.name)
    if not isinstance(content, list):
        raise UnreadableFile(f'{path.name} must hold a list of objects')
    rows = cast('list[Any]', content)
    return [_checked(row, f'{path.name}, item {index}') for index, row in enumerate(rows)]


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableFile(f'{place} is not JSON: {error.msg} at column {error.colno}') from error


def _checked(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise UnreadableFile(f'{place} must be an object, got {type(value).__name__}')
    return cast('Row', value)


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
        for row in rows:
            file.write(json.dumps(plain(row), ensure_ascii=False) + '\n')


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    _arrow_files().write_parquet(path, map(plain, rows), batch_rows)


def _write_csv(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    _arrow_files().write_csv(path, map(plain, rows), batch_rows)


def _write_arrow(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    module = _arrow_rows()
    module.write_arrow(path, rows if isinstance(rows, module.ArrowRows) else map(plain, rows), batch_rows)


def _arrow_rows() -> ModuleType:
    from twinkle.dataset import arrow_rows  # noqa: PLC0415 - as below

    return arrow_rows


def _arrow_files() -> ModuleType:
    # Loaded where such a file is met: pyarrow costs more memory than the rest of this library together.
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
    'json': _read_json,
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
