"""Write files of rows: JSON lines, Parquet, CSV and Arrow; `loading` reads them."""

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from twinkle.dataset.errors import UnreadableFile
from twinkle.dataset.hf import table_of

FORMATS = ('jsonl', 'json', 'parquet', 'csv', 'arrow')
"""Names of the formats that the data service reads, which are also the file suffixes. In process, the library
`datasets` reads these and further formats."""

_NOT_JSON = (TypeError, ValueError, RecursionError)
"""Errors for values of other types, text that is not valid Unicode, cycles, and deeply nested values."""


def format_of(path: Path) -> str | None:
    """Return the format of a file according to its suffix, or None if the suffix is not in `FORMATS`."""
    suffix = path.suffix.lstrip('.').lower()
    return suffix if suffix in FORMATS else None


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
        raise UnreadableFile(f'{path.name}: cannot write the format {chosen!r}; use one of {", ".join(_WRITERS)}')
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


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]], _batch_rows: int) -> None:
    with path.open('w', encoding='utf-8') as file:
        for position, row in enumerate(rows):
            file.write(json_line(position, row) + '\n')


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    _table_of(rows).to_parquet(str(path), batch_size=batch_rows)


def _write_csv(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    table = _table_of(rows)
    nested = [name for name, feature in table.features.items() if not hasattr(feature, 'dtype')]
    if nested:
        raise UnreadableFile(f'columns {nested} contain lists or objects, which CSV cannot represent; use jsonl')
    csv: Any = importlib.import_module('pyarrow.csv')  # imported only if needed
    csv.write_csv(table.with_format('arrow')[:], str(path), csv.WriteOptions(batch_size=batch_rows))


def _write_arrow(path: Path, rows: Iterable[Mapping[str, Any]], batch_rows: int) -> None:
    pa: Any = importlib.import_module('pyarrow')  # imported only if needed
    table = _table_of(rows)
    with pa.OSFile(str(path), 'wb') as sink, pa.ipc.new_stream(sink, table.features.arrow_schema) as writer:
        for batch in table.with_format('arrow').iter(batch_rows):
            writer.write_table(batch)


def _table_of(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Return rows as a `datasets.Dataset`.

    An existing table is not copied, unless it has columns of the type `Json`, which few programs can read.
    """
    table = getattr(rows, 'table', None)
    return table_of(map(dict, rows)) if table is None or 'Json(' in str(table.features) else table


_WRITERS: dict[str, Callable[[Path, Iterable[Mapping[str, Any]], int], None]] = {
    'jsonl': _write_jsonl,
    'parquet': _write_parquet,
    'csv': _write_csv,
    'arrow': _write_arrow,
}
