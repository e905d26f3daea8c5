"""Streams of rows that can be opened again and again, and what is done to rows on their way.

A row that cannot be worked out does not end a stream: it comes out as a `RefusedRow`, so that a
reader may report it and go on with the next one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from twinkle.dataset.files import Row

ROW_ERRORS = (ValueError, LookupError, TypeError, ArithmeticError, OSError)
"""Errors that data cause; what else a function raises is a fault of the program and ends the stream."""

BATCH_ROWS = 100
"""Rows a preprocessor sees and a tokenizer encodes together: the most that are read ahead."""


@dataclass(frozen=True)
class RefusedRow:
    """A row that could not be worked out."""

    error: Exception
    """Why; it names the row by its place in the stream."""


Item = Row | RefusedRow
BatchChange = Callable[[list[Row], int], list[Row]]
"""Rows and the place of the first in the stream, to what they become: as many, fewer or more."""


@dataclass(frozen=True)
class Stream:
    """Rows that are read one after the other; each iteration begins anew."""

    opened: Callable[[], Iterator[Item]]
    """Begin a pass."""

    def __iter__(self) -> Iterator[Item]:
        return self.opened()


def changed(
    stream: Stream,
    change: Callable[[], BatchChange],
    *,
    batch_rows: int = BATCH_ROWS,
    at_end: Callable[[], None] | None = None,
) -> Stream:
    """Return a stream whose rows went through a change.

    Args:
        change: makes it anew for each pass.
        batch_rows: rows changed together. A batch that fails is changed again row by row, so what
            remembers rows takes 1.
        at_end: called when a pass is over.
    """

    def opened() -> Iterator[Item]:
        yield from _changed(iter(stream), change(), batch_rows)
        if at_end is not None:
            at_end()

    return Stream(opened)


def chained(streams: Sequence[Stream]) -> Stream:
    """Return one stream after the other."""
    return Stream(lambda: (item for stream in streams for item in stream))


def interleaved(streams: Sequence[Stream]) -> Stream:
    """Return streams taking turns; one that has ended is left out."""
    return Stream(lambda: _interleaved([iter(stream) for stream in streams]))


def repeated(stream: Stream) -> Stream:
    """Return a stream that begins again when it ends; one without rows stays so."""
    return Stream(lambda: _repeated(stream))


def _changed(items: Iterator[Item], change: BatchChange, batch_rows: int) -> Iterator[Item]:
    waiting: list[Row] = []
    begin = 0
    for item in items:
        if not isinstance(item, RefusedRow):
            waiting.append(item)
        if len(waiting) == batch_rows or isinstance(item, RefusedRow):
            yield from _done(waiting, begin, change)
            begin += len(waiting)
            waiting = []
        if isinstance(item, RefusedRow):
            begin += 1
            yield item
    yield from _done(waiting, begin, change)


def _done(rows: list[Row], begin: int, change: BatchChange) -> list[Item]:
    """Change rows together; only when something is wrong, one by one, to keep the others."""
    if len(rows) == 1:
        return _done_alone(rows[0], begin, change)
    try:
        return [*change(rows, begin)] if rows else []
    except ROW_ERRORS:
        return [item for index, row in enumerate(rows, start=begin) for item in _done_alone(row, index, change)]


def _done_alone(row: Row, index: int, change: BatchChange) -> list[Item]:
    try:
        return [*change([row], index)]
    except ROW_ERRORS as error:
        return [RefusedRow(error)]


def _interleaved(open_streams: list[Iterator[Item]]) -> Iterator[Item]:
    waiting = deque(open_streams)
    while waiting:
        stream = waiting.popleft()
        for item in stream:
            yield item
            waiting.append(stream)
            break


def _repeated(stream: Stream) -> Iterator[Item]:
    has_rows = True
    while has_rows:
        has_rows = False
        for item in stream:
            has_rows = True
            yield item
