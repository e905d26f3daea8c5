"""Base class of quality filters, and the reasons for removed rows."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from twinkle.preprocessor.base import DataFilter, Row
from twinkle.preprocessor.errors import InvalidRow

UNREADABLE = 'unreadable'
"""Reason for removing a row that lacks a column or does not contain a valid chat."""


@dataclass(frozen=True)
class Drop:
    """Reason for removing a row."""

    reason: str
    """Stable identifier, such as 'duplicate'."""
    detail: str = ''
    """Location and description of the problem, as text. Default: empty."""


@dataclass(frozen=True, kw_only=True)
class DroppedRow:
    """A removed row."""

    row_index: int
    """Zero-based index among all rows of the iteration."""
    stage: str
    """Name of the class or function that removed the row."""
    drop: Drop
    """Reason for removing the row."""
    row: Row
    """The row as the stage received it."""


class QualityFilter(DataFilter):
    """Filters rows one by one, in order. A row that cannot be read is removed with the reason 'unreadable'.

    Subclasses override `drop_of`. Stateful subclasses also override `begin_pass` and call `super().begin_pass()`.
    """

    row_index = 0
    """Zero-based index of the current row in the iteration, for use in `drop_of`."""
    # Class attributes are the initial state, so that subclasses do not have to call an __init__.
    _seen = 0
    _counts: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def drop_of(self, row: Row) -> Drop | None:
        """Return the reason for removing the row, or None to keep it.

        Raises:
            InvalidRow: the row cannot be read.
        """

    def judge(self, row: Row, *, row_index: int | None = None) -> Drop | None:
        """Return the reason for removing the row, or None to keep it. An unreadable row causes no error.

        Args:
            row: the next row of the iteration.
            row_index: index of the row in the iteration, for messages. Default: the number of rows judged so far.
        """
        self.row_index = self._seen if row_index is None else row_index
        try:
            drop = self.drop_of(row)
        except InvalidRow as error:
            drop = Drop(UNREADABLE, f'{error.column} {error.problem}'.strip())
        self._seen += 1
        if drop is not None:
            self._counts = {**self._counts, drop.reason: self._counts.get(drop.reason, 0) + 1}
        return drop

    def __call__(self, row: Row) -> bool:
        """Return whether the row is kept."""
        return self.judge(row) is None

    def split(self, rows: Iterable[Row]) -> tuple[list[Row], list[DroppedRow]]:
        """Filter the next rows of the iteration; return the kept rows and the removed rows, each in order."""
        kept: list[Row] = []
        dropped: list[DroppedRow] = []
        for row in rows:
            index = self._seen
            drop = self.judge(row)
            if drop is None:
                kept.append(row)
            else:
                dropped.append(DroppedRow(row_index=index, stage=type(self).__name__, drop=drop, row=row))
        return kept, dropped

    def begin_pass(self) -> None:
        """Reset the counters."""
        self._seen, self._counts = 0, {}

    def end_pass(self) -> list[str]:
        """Return one line per reason with the number of removed rows."""
        stage = type(self).__name__
        counts = sorted(self._counts.items())
        return [f'{count} of {self._seen} rows were left out by {stage}: {reason}' for reason, count in counts]
