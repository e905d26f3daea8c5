"""What a quality filter is, and how it says why a row does not stay."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from twinkle.preprocessor.base import DataFilter, Row
from twinkle.preprocessor.errors import InvalidRow

UNREADABLE = 'unreadable'
"""Reason of a row that lacks a column or holds something else than a chat."""


@dataclass(frozen=True)
class Drop:
    """Why a row does not stay."""

    reason: str
    """A word that does not change between releases, such as 'duplicate'."""
    detail: str = ''
    """Where and what, for people."""


@dataclass(frozen=True, kw_only=True)
class DroppedRow:
    """A row that did not stay."""

    row_index: int
    """Zero-based, among the rows of the pass."""
    stage: str
    """Class or function that left it out."""
    drop: Drop
    row: Row
    """As the stage saw it."""


class QualityFilter(DataFilter):
    """Judges rows one by one, in order. A row it cannot read is left out as 'unreadable', never raised about.

    Subclasses override `drop_of`; one that remembers rows overrides `begin_pass`, too, and calls this one.
    """

    row_index = 0
    """Zero-based, in the pass: of the row that is judged, or of the next one."""
    # Of the class, so that subclasses need not call an __init__ to begin with nothing.
    _seen = 0
    _counts: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def drop_of(self, row: Row) -> Drop | None:
        """Return why the row does not stay; None where it does.

        Raises:
            InvalidRow: it cannot be read.
        """

    def judge(self, row: Row, *, row_index: int | None = None) -> Drop | None:
        """Return why the row does not stay, rows that cannot be read among them; None where it does.

        Args:
            row_index: of the row in the pass, for messages. Unset: rows come one after the other.
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
        """Return whether the row stays."""
        return self.judge(row) is None

    def split(self, rows: Iterable[Row]) -> tuple[list[Row], list[DroppedRow]]:
        """Return the rows that stay, in order, and those that do not."""
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
        """Count from the beginning."""
        self._seen, self._counts = 0, {}

    def end_pass(self) -> list[str]:
        """Return how many rows were left out, one line a reason."""
        stage = type(self).__name__
        counts = sorted(self._counts.items())
        return [f'{count} of {self._seen} rows were left out by {stage}: {reason}' for reason, count in counts]
