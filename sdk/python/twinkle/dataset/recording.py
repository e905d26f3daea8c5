"""Write rows down as they are read, so that what was trained on can be looked at."""

import json
from itertools import count
from pathlib import Path

from twinkle.dataset.errors import UnreadableFile
from twinkle.dataset.files import Row, iter_rows, plain, refuse_unwritable, write_rows


class RowRecorder:
    """Appends each row once, by its position, as a line of JSON; `close` makes the file that was asked for.

    Until then the lines are in a `.part` file beside it, so a run that dies leaves what it had read.
    """

    def __init__(self, path: Path, file_format: str | None, *, batch_rows: int) -> None:
        """Prepare to write.

        Args:
            path: the file that `close` leaves.
            file_format: as of `write_rows`.
            batch_rows: rows kept in memory before they are appended.

        Raises:
            UnreadableFile: the format is unknown or cannot be written.
        """
        self._format = refuse_unwritable(path, file_format)
        self._path = path
        self._lines_path = _free_path(path)
        self._batch_rows = batch_rows
        self._seen: set[int] = set()
        self._waiting: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines_path.touch()

    def add(self, position: int, row: Row) -> None:
        """Write a row down, unless the one at this position was written before.

        Raises:
            UnreadableFile: it holds what JSON cannot.
        """
        if position in self._seen:
            return
        try:
            line = json.dumps(plain(row), ensure_ascii=False)
        except TypeError as error:
            raise UnreadableFile(f'rows[{position}] cannot be written: {error}') from error
        self._seen.add(position)
        self._waiting.append(line)
        if len(self._waiting) >= self._batch_rows:
            self._append()

    def close(self) -> None:
        """Leave the complete file.

        Raises:
            UnreadableFile: its format cannot hold the rows; the lines stay.
        """
        self._append()
        if self._format == 'jsonl':
            self._lines_path.replace(self._path)
            return
        write_rows(self._path, iter_rows(self._lines_path, 'jsonl'), self._format, batch_rows=self._batch_rows)
        self._lines_path.unlink()

    def _append(self) -> None:
        with self._lines_path.open('a', encoding='utf-8') as file:
            file.writelines(f'{line}\n' for line in self._waiting)
        self._waiting = []


def _free_path(path: Path) -> Path:
    """Return a name that no earlier recording, perhaps one that died, has taken."""
    names = (path.with_name(f'.{path.name}.{number}.jsonl.part') for number in count())
    return next(name for name in names if not name.exists())
