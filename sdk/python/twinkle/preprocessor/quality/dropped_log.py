"""Rows that did not stay, written to a file, one JSON object a line."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from twinkle.preprocessor.errors import InvalidArguments
from twinkle.preprocessor.quality.base import DroppedRow


class DroppedLog:
    """A JSONL file of `row_index`, `stage`, `reason`, `detail` and the `row` itself.

    What has no JSON form, such as an image, is described instead. Each pass begins the file anew.
    """

    def __init__(self, path: str) -> None:
        """Check the place, and write nothing yet.

        Raises:
            InvalidArguments: there is no such folder, or the path is a folder.
        """
        self._path = Path(path)
        if not self._path.parent.is_dir() or self._path.is_dir():
            raise InvalidArguments(f'dropped_log_path must be a file in a folder that exists, got {path!r}')
        self._is_begun = False

    def begin_pass(self) -> None:
        """Let the next rows begin the file anew."""
        self._is_begun = False

    def write(self, dropped: Iterable[DroppedRow]) -> None:
        """Write rows behind those of this pass."""
        with self._path.open('a' if self._is_begun else 'w', encoding='utf-8') as file:
            self._is_begun = True
            file.writelines(f'{_line(row)}\n' for row in dropped)


def _line(dropped: DroppedRow) -> str:
    facts = {
        'row_index': dropped.row_index,
        'stage': dropped.stage,
        'reason': dropped.drop.reason,
        'detail': dropped.drop.detail,
    }
    try:
        return json.dumps({**facts, 'row': _plain(dropped.row)}, default=_described)
    except (TypeError, ValueError, RecursionError):
        # A value that contains itself, or is nested too deep: the columns that can be written are.
        return json.dumps({**facts, 'row': {str(name): _attempt(value) for name, value in dropped.row.items()}})


def _attempt(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return _described(value)
    return value


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in row.items()}


def _described(value: Any) -> str:
    size = f' of {len(cast("bytes", value))} bytes' if isinstance(value, bytes | bytearray) else ''
    return f'<{type(value).__name__}{size}>'
