"""Read and write files of rows: JSON lines, JSON, Parquet, CSV and Arrow."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from twinkle.dataset.errors import UnreadableFile

Row = dict[str, Any]

FORMATS = ('jsonl', 'json', 'parquet', 'csv', 'arrow')
"""Names of the supported formats, which are also the file suffixes."""
MAX_DEPTH = 64
"""Maximum number of levels of nested lists and objects in a file of JSON."""


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
    """
    chosen = file_format or format_of(path)
    if chosen not in _READERS:
        raise UnreadableFile(f'{path.name}: the format must be one of {", ".join(FORMATS)}')
    return _READERS[chosen](path)


def iter_rows(path: Path, file_format: str | None = None) -> Iterator[Row]:
    """Yield the rows of a file, reading it in pieces (a JSON list is read completely).

    The types of CSV columns are inferred from the first block, not from all rows.

    Args:
        path: the file.
        file_format: one of `FORMATS`. Default: the suffix of the path.

    Raises:
        UnreadableFile: as in `read_rows`; raised during iteration.
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
        UnreadableFile: the format is unknown, cannot be written, or cannot represent the rows.
    """
    chosen = refuse_unwritable(path, file_format)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f'.{path.name}.part')
    _WRITERS[chosen](staging, rows, batch_rows)
    staging.replace(path)


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
    """Return a value with numpy arrays converted to lists, for JSON."""
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


def rows_of_lines(name: str, lines: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of JSON lines.

    Args:
        name: name of the file, for errors.
        lines: its lines; empty lines are skipped.

    Raises:
        UnreadableFile: a line is not a JSON object, or the text is not UTF-8.
    """
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _checked(_parse(line, f'{name}, line {number}'), f'{name}, line {number}')
    except UnicodeDecodeError as error:
        raise UnreadableFile(f'{name} is not UTF-8 text') from error


def read_json_rows(path: Path) -> list[Row]:
    """Return the rows of a file that contains one JSON list of objects.

    Raises:
        UnreadableFile: the file does not contain such a list.
    """
    try:
        text = path.read_text(encoding='utf-8-sig')
    except UnicodeDecodeError as error:
        raise UnreadableFile(f'{path.name} is not UTF-8 text') from error
    content = _parse(text, path.name)
    if not isinstance(content, list):
        raise UnreadableFile(f'{path.name} must contain a list of objects')
    rows = cast('list[Any]', content)
    return [_checked(row, f'{path.name}, item {index}') for index, row in enumerate(rows)]


def _parse(text: str, location: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableFile(f'{location} is not JSON: {error.msg} at column {error.colno}') from error
    except ValueError as error:
        raise UnreadableFile(f'{location} has an integer with too many digits') from error
    except RecursionError as error:
        raise UnreadableFile(f'{location} is nested more than {MAX_DEPTH} levels deep') from error
    # A value has at most as many levels as brackets.
    if text.count('[') + text.count('{') > MAX_DEPTH and not _is_shallow(value):
        raise UnreadableFile(f'{location} is nested more than {MAX_DEPTH} levels deep')
    # An escape may encode half of a surrogate pair, which UTF-8 cannot represent.
    if '\\ud' in text.lower() and not _is_encodable(value):
        raise UnreadableFile(f'{location} has an unpaired surrogate')
    return value


def _is_shallow(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for parent in level for item in _items(parent) if isinstance(item, dict | list)]
    return not level


def _items(value: Any) -> Iterable[Any]:
    return cast('dict[str, Any]', value).values() if isinstance(value, dict) else cast('list[Any]', value)


def _is_encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked(value: Any, location: str) -> Row:
    if not isinstance(value, dict):
        raise UnreadableFile(f'{location} must be an object, got {type(value).__name__}')
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
    from twinkle.dataset import arrow_rows  # noqa: PLC0415 - see `_arrow_files`

    return arrow_rows


def _arrow_files() -> ModuleType:
    # Imported only for files that need it, because pyarrow takes more memory than the rest of this library.
    from twinkle.dataset import arrow_files  # noqa: PLC0415 - see above

    return arrow_files


_READERS: dict[str, Callable[[Path], Sequence[Row]]] = {
    'jsonl': _read_jsonl,
    'json': read_json_rows,
    'parquet': _read_parquet,
    'csv': _read_csv,
    'arrow': _read_arrow,
}
_STREAMS: dict[str, Callable[[Path], Iterable[Row]]] = {
    'jsonl': _stream_jsonl,
    'json': read_json_rows,
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
