"""Streams of rows that can be iterated repeatedly, and transformations of streams.

A row that cannot be processed does not end a stream. It is yielded as a `RefusedRow`, so that a reader can report it
and continue with the next row.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from twinkle.dataset.row_bounds import Row

ROW_ERRORS = (ValueError, LookupError, TypeError, ArithmeticError, OSError)
"""Exceptions caused by data. Any other exception is a programming error and ends the stream."""

BATCH_ROWS = 100
"""Number of rows per call of a preprocessor or tokenizer, which is also the maximum read-ahead."""


@dataclass(frozen=True)
class RefusedRow:
    """A row that could not be processed."""

    error: Exception
    """The reason. Errors of this library name the row by its zero-based position in the stream."""
    part: int = 0
    """Index of the stream that refused the row, among those that were mixed; 0 for a step after mixing."""
    later_steps: int = 0
    """Number of steps after the one that refused the row."""

    def passed(self) -> 'RefusedRow':
        """Return the row after another step, which does not process it."""
        return replace(self, later_steps=self.later_steps + 1)


Item = Row | RefusedRow
BatchChange = Callable[[list[Row], int], list[Row]]
"""Function from some rows and the position of the first row in the stream to any number of new rows."""


@dataclass(frozen=True)
class Stream:
    """Rows that are read in order; each iteration starts at the first row."""

    opened: Callable[[], Iterator[Item]]
    """Function that starts a new iteration."""

    def __iter__(self) -> Iterator[Item]:
        return self.opened()


def changed(
    stream: Stream,
    change: Callable[[], BatchChange],
    *,
    batch_rows: int = BATCH_ROWS,
    at_end: Callable[[], None] | None = None,
) -> Stream:
    """Return a stream of transformed rows.

    Args:
        stream: the original rows.
        change: creates the transformation for each iteration.
        batch_rows: number of rows transformed together; must be 1 for a stateful transformation, because a batch that
            fails is repeated row by row. Default: 100.
        at_end: called after each complete iteration.
    """

    def opened() -> Iterator[Item]:
        yield from _changed(iter(stream), change(), batch_rows)
        if at_end is not None:
            at_end()

    return Stream(opened)


def chained(streams: Sequence[Stream]) -> Stream:
    """Return the concatenation of streams."""
    return Stream(lambda: (item for part, stream in enumerate(streams) for item in _part_of(stream, part)))


def interleaved(streams: Sequence[Stream]) -> Stream:
    """Return a stream that takes rows in turn from each stream; an exhausted stream is skipped."""
    return Stream(lambda: _interleaved([_part_of(stream, part) for part, stream in enumerate(streams)]))


def repeated(stream: Stream) -> Stream:
    """Return an endless repetition of a stream; an empty stream stays empty."""
    return Stream(lambda: _repeated(stream))


def _changed(items: Iterator[Item], change: BatchChange, batch_rows: int) -> Iterator[Item]:
    batch: list[Row] = []
    begin = 0
    for item in items:
        if not isinstance(item, RefusedRow):
            batch.append(item)
        if len(batch) == batch_rows or isinstance(item, RefusedRow):
            yield from _change_batch(batch, begin, change)
            begin += len(batch)
            batch = []
        if isinstance(item, RefusedRow):
            begin += 1
            yield item.passed()
    yield from _change_batch(batch, begin, change)


def _change_batch(rows: list[Row], begin: int, change: BatchChange) -> list[Item]:
    """Transform rows together; if that fails, transform them one by one to keep the valid rows."""
    if len(rows) == 1:
        return _change_row(rows[0], begin, change)
    try:
        return [*change(rows, begin)] if rows else []
    except ROW_ERRORS:
        return [item for index, row in enumerate(rows, start=begin) for item in _change_row(row, index, change)]


def _change_row(row: Row, index: int, change: BatchChange) -> list[Item]:
    try:
        return [*change([row], index)]
    except ROW_ERRORS as error:
        return [RefusedRow(error)]


def _part_of(stream: Stream, part: int) -> Iterator[Item]:
    return (replace(item, part=part) if isinstance(item, RefusedRow) else item for item in stream)


def _interleaved(open_streams: list[Iterator[Item]]) -> Iterator[Item]:
    queue = deque(open_streams)
    while queue:
        stream = queue.popleft()
        for item in stream:
            yield item
            queue.append(stream)
            break


def _repeated(stream: Stream) -> Iterator[Item]:
    has_rows = True
    while has_rows:
        has_rows = False
        for item in stream:
            has_rows = True
            yield item
