"""A JSON lines file of removed rows."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from twinkle.preprocessor.errors import InvalidArguments
from twinkle.preprocessor.quality.base import DroppedRow


class DroppedLog:
    """Writes one JSON object per removed row, with `row_index`, `stage`, `reason`, `detail` and `row`.

    Values that JSON cannot represent, such as images, are replaced by a short description. Each iteration overwrites
    the file.
    """

    def __init__(self, path: str) -> None:
        """Check the path; the file is created by the first `write`.

        Raises:
            InvalidArguments: the parent folder does not exist, or the path is a folder.
        """
        self._path = Path(path)
        if not self._path.parent.is_dir() or self._path.is_dir():
            raise InvalidArguments(f'dropped_log_path must be a file in an existing folder, got {path!r}')
        self._has_written = False

    def begin_pass(self) -> None:
        """Start a new iteration; the next `write` overwrites the file."""
        self._has_written = False

    def write(self, dropped: Iterable[DroppedRow]) -> None:
        """Write rows; the first call of an iteration overwrites the file, and later calls append to it."""
        with self._path.open('a' if self._has_written else 'w', encoding='utf-8') as file:
            self._has_written = True
            file.writelines(f'{_line(row)}\n' for row in dropped)


def _line(dropped: DroppedRow) -> str:
    fields = {
        'row_index': dropped.row_index,
        'stage': dropped.stage,
        'reason': dropped.drop.reason,
        'detail': dropped.drop.detail,
    }
    try:
        return json.dumps({**fields, 'row': _with_text_keys(dropped.row)}, default=_described)
    except (TypeError, ValueError, RecursionError):
        # A value contains itself or is nested too deeply; the other columns are still written.
        return json.dumps({**fields, 'row': {str(name): _json_value(value) for name, value in dropped.row.items()}})


def _json_value(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return _described(value)
    return value


def _with_text_keys(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in row.items()}


def _described(value: Any) -> str:
    size = f' of {len(cast("bytes", value))} bytes' if isinstance(value, bytes | bytearray) else ''
    return f'<{type(value).__name__}{size}>'
