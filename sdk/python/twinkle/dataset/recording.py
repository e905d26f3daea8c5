"""Record rows when they are read, so that the rows used for training can be inspected."""

import json
import os
from pathlib import Path

from twinkle.dataset.errors import NotReady
from twinkle.dataset.files import json_line, refuse_unwritable, write_rows
from twinkle.dataset.row_bounds import Row


class RowRecorder:
    """Records the row of each position once, as a line of JSON; `close` converts the lines to the requested format.

    Until then, the lines are in a `.part` file in the same folder. A run that fails loses fewer than `batch_rows` rows.
    """

    def __init__(self, path: Path, file_format: str | None, *, batch_rows: int) -> None:
        """Create the `.part` file.

        Args:
            path: the file that `close` creates.
            file_format: 'jsonl', 'parquet', 'csv' or 'arrow'. None: the suffix of the path.
            batch_rows: number of rows kept in memory before they are appended.

        Raises:
            UnreadableFile: the format is unknown or cannot be written.
            NotReady: this process is one of several ranks, which would all write the same file.
        """
        self._format = refuse_unwritable(path, file_format)
        _refuse_ranks()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lines_path = _create_part_file(path)
        self._batch_rows = batch_rows
        self._seen: set[int] = set()
        self._buffer: list[str] = []

    def add(self, position: int, row: Row) -> None:
        """Record a row, unless a row with this position is already recorded.

        Raises:
            UnreadableFile: the row contains values that JSON cannot represent.
        """
        if position in self._seen:
            return
        line = json_line(position, row)
        self._seen.add(position)
        self._buffer.append(line)
        if len(self._buffer) >= self._batch_rows:
            self._append()

    def close(self) -> None:
        """Create the requested file and delete the `.part` file.

        Raises:
            UnreadableFile: the format cannot represent the rows; the `.part` file is kept.
        """
        self._append()
        if self._format == 'jsonl':
            self._lines_path.replace(self._path)
            return
        with self._lines_path.open(encoding='utf-8') as lines:
            write_rows(self._path, map(json.loads, lines), self._format, batch_rows=self._batch_rows)
        self._lines_path.unlink()

    def _append(self) -> None:
        with self._lines_path.open('a', encoding='utf-8') as file:
            file.writelines(f'{line}\n' for line in self._buffer)
        self._buffer = []


def _create_part_file(path: Path) -> Path:
    """Create an empty file whose name is not used by another recording, including recordings that failed."""
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
            f"mode='training' is not supported with several ranks (RANK {rank}, WORLD_SIZE {world_size}), because they "
            "would overwrite each other's file; record in a single process, or use mode='immediate' in one rank"
        )
