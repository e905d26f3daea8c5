"""Files of rows from which single rows can be read.

Per-token columns are flat arrays that are mapped into memory. All other columns are JSON, one line per row. Two arrays
contain the offset of each row in these files.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from twinkle.dataset.files import plain
from twinkle_services.data.domain import TOKEN_COLUMNS, Row, Table

_DTYPES = {name: np.float32 if name == 'loss_weights' else np.int32 for name in TOKEN_COLUMNS}
_IMPLIED_COLUMNS = ('attention_mask', 'length')
"""Columns that are computed from the number of tokens and are therefore not stored."""
_LINES, _LINE_OFFSETS, _TOKEN_OFFSETS = 'rows.jsonl', 'row_offsets.npy', 'token_offsets.npy'


def write_rows(folder: Path, table: Table) -> str:
    """Write a table into an empty folder, and return the digest of the rows that a loader reads."""
    digest = hashlib.blake2s()
    tokens = _token_columns(table)
    omitted = {*tokens, *_IMPLIED_COLUMNS, 'position_ids'} if table.is_encoded else set[str]()
    offsets = [0]
    with (folder / _LINES).open('wb') as file:
        for row in table.rows:
            stored = {name: plain(value) for name, value in row.items() if name not in omitted}
            line = json.dumps(stored, ensure_ascii=False).encode() + b'\n'
            offsets.append(offsets[-1] + file.write(line))
            digest.update(line)
        file.flush()
        os.fsync(file.fileno())
    _save(folder / _LINE_OFFSETS, np.asarray(offsets, dtype=np.int64))
    if table.is_encoded:
        lengths = np.asarray([len(row['input_ids']) for row in table.rows], dtype=np.int64)
        _save(folder / _TOKEN_OFFSETS, np.append(np.int64(0), np.cumsum(lengths)))
        digest.update(lengths.tobytes())
    for name in tokens:
        flat = _concatenated(table, name)
        _save(folder / f'{name}.npy', flat)
        digest.update(flat.tobytes())
    return digest.hexdigest()


class RowFiles:
    """Reads the files of `write_rows`.

    Concurrency: threads may share an instance. Open files stay readable after they are deleted.
    """

    _lines: BinaryIO | None = None

    def __init__(self, folder: Path) -> None:
        self._lines = (folder / _LINES).open('rb')
        self._lines_file = self._lines.fileno()
        self._line_offsets = _load(folder / _LINE_OFFSETS)
        has_tokens = (folder / _TOKEN_OFFSETS).exists()
        self._token_offsets = _load(folder / _TOKEN_OFFSETS) if has_tokens else None
        paths = {name: folder / f'{name}.npy' for name in TOKEN_COLUMNS}
        self._tokens = {name: _load(path) for name, path in paths.items() if path.exists()}

    def __len__(self) -> int:
        return len(self._line_offsets) - 1

    def read(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows at these indices, in this order; arrays are copies."""
        return [self._row(index) for index in indices]

    def __iter__(self) -> Iterator[Row]:
        return (self._row(index) for index in range(len(self)))

    def _row(self, index: int) -> Row:
        begin, end = int(self._line_offsets[index]), int(self._line_offsets[index + 1])
        row: Row = json.loads(os.pread(self._lines_file, end - begin, begin))
        if self._token_offsets is None:
            return row
        first, last = int(self._token_offsets[index]), int(self._token_offsets[index + 1])
        # Copies allow the file to be unmapped while a caller still uses the rows.
        arrays: dict[str, Any] = {name: np.array(column[first:last]) for name, column in self._tokens.items()}
        return {**row, **arrays}

    def __del__(self) -> None:
        if self._lines is not None:
            self._lines.close()


def as_stored(row: Row, *, has_positions: bool = False) -> Row:
    """Return an encoded row in the form in which `RowFiles` would read it after `write_rows`.

    Args:
        row: The row.
        has_positions: Whether the row is packed, so that its positions are kept.
    """
    omitted = {*TOKEN_COLUMNS, *_IMPLIED_COLUMNS}
    others = {name: plain(value) for name, value in row.items() if name not in omitted}
    names = (name for name in TOKEN_COLUMNS if name in row and (has_positions or name != 'position_ids'))
    return {**others, **{name: np.asarray(row[name], dtype=_DTYPES[name]) for name in names}}


def _token_columns(table: Table) -> list[str]:
    if not table.is_encoded or not table.rows:
        return []
    names = [name for name in TOKEN_COLUMNS if name in table.rows[0]]
    # Positions are stored only for packed samples. In other rows they count from 0.
    return names if table.is_packed else [name for name in names if name != 'position_ids']


def _concatenated(table: Table, name: str) -> npt.NDArray[Any]:
    columns = [np.asarray(row[name], dtype=_DTYPES[name]) for row in table.rows]
    return np.concatenate(columns)


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    with path.open('wb') as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _load(path: Path) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.load(path, mmap_mode='r', allow_pickle=False)
    return array
