"""Limits on the rows that are read into memory, for services that read files of untrusted callers."""

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Protocol, cast

import numpy as np

from twinkle.dataset.errors import DatasetError, UnreadableFile

Row = dict[str, Any]

MAX_COLUMNS = 4096
"""Maximum number of columns of a bounded file."""
MAX_CHARACTERS = 8 << 20
"""Maximum number of characters of a line or a JSON object, which are parsed as a whole."""


class RowBounds(Protocol):
    """Counts the rows in memory and their bytes.

    Concurrency: one thread at a time.
    """

    def charge(self, size_bytes: int, row_count: int = 0) -> None:
        """Count rows and bytes; negative numbers release them.

        Raises:
            Exception: a limit would be exceeded; nothing was counted, and the reader stops.
        """
        ...


def counted(rows: Iterable[Row], bounds: RowBounds) -> Iterator[Row]:
    """Yield rows and charge their size in memory.

    Raises:
        DatasetError: the rows have too many columns.
        Exception: an error of `bounds.charge`; the rows exceed a limit.
    """
    names: set[str] = set()
    for row in rows:
        if not row.keys() <= names:
            names |= row.keys()
            refuse_columns(len(names))
        bounds.charge(size_in_memory(row), 1)
        yield row


@contextmanager
def held(bounds: RowBounds, size_bytes: int) -> Generator[None]:
    """Charge bytes that are in memory only inside the context."""
    bounds.charge(size_bytes)
    try:
        yield
    finally:
        bounds.charge(-size_bytes)


def bounded_lines(name: str, file: IO[str]) -> Iterator[str]:
    """Yield the lines of a text file.

    Args:
        name: name of the file, for errors.
        file: the opened file.

    Raises:
        UnreadableFile: a line is too long.
    """
    while line := file.readline(MAX_CHARACTERS + 1):
        if len(line) > MAX_CHARACTERS:
            raise UnreadableFile(f'{name} has a line of more than {MAX_CHARACTERS} characters')
        yield line


def refuse_columns(count: int) -> None:
    """Raise an error if a file has too many columns.

    Raises:
        DatasetError: there are more than `MAX_COLUMNS`.
    """
    if count > MAX_COLUMNS:
        raise DatasetError(f'the rows have {count} columns, and must have at most {MAX_COLUMNS}')


def size_in_memory(value: Any) -> int:
    """Return the bytes that a JSON value or a row takes in memory; a value that occurs twice counts twice."""
    size_bytes, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, np.ndarray):
            size_bytes += cast('Any', item).nbytes
            continue
        size_bytes += sys.getsizeof(item)
        if isinstance(item, Mapping):
            pending.extend(cast('Mapping[Any, Any]', item).keys())
            pending.extend(cast('Mapping[Any, Any]', item).values())
        elif isinstance(item, list | tuple):
            pending.extend(cast('list[Any]', item))
    return size_bytes
