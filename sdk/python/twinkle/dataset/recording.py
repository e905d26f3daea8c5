"""Write rows down as they are read, so that what was trained on can be looked at."""

import json
import os
from pathlib import Path

from twinkle.dataset.errors import NotReady, UnreadableFile
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
            NotReady: this program is one of several ranks, which read parts of the rows and would write one file.
        """
        self._format = refuse_unwritable(path, file_format)
        _refuse_ranks()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lines_path = _taken_path(path)
        self._batch_rows = batch_rows
        self._seen: set[int] = set()
        self._waiting: list[str] = []

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


def _taken_path(path: Path) -> Path:
    """Make an empty file of a name that no other recording, perhaps one that died, has taken."""
    number = 0
    while True:
        lines_path = path.with_name(f'.{path.name}.{number}.jsonl.part')
        try:
            lines_path.open('x').close()
        except FileExistsError:
            number += 1
        else:
            return lines_path


def _refuse_ranks() -> None:
    world_size, rank = os.environ.get('WORLD_SIZE', '1'), os.environ.get('RANK', '0')
    if world_size.strip() not in {'', '0', '1'} or rank.strip() not in {'', '0'}:
        raise NotReady(
            f"mode='training' in one of several ranks (RANK {rank}, WORLD_SIZE {world_size}), each of which would "
            "replace the others' file; record in a program of its own, or use mode='immediate' in one rank"
        )
