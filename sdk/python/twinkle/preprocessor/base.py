"""Base classes of preprocessors and filters."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinkle.data_format import Message
from twinkle.preprocessor.errors import InvalidRow

Row = dict[str, Any]
Columns = dict[str, list[Any]]


class Preprocessor(ABC):
    """Converts rows, one batch at a time.

    The returned columns replace the old columns, so columns to keep must be returned. The number of rows may change.
    Subclasses override `__call__`. Classes that convert rows one by one derive from `RowPreprocessor` instead.
    """

    @abstractmethod
    def __call__(self, rows: Columns) -> Columns:
        """Convert a batch of rows.

        Args:
            rows: mapping of column names to one value per row.

        Returns:
            Columns of equal length.

        Raises:
            InvalidRow: a row cannot be read.
        """

    @staticmethod
    def map_col_to_row(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
        """Convert columns of equal length to rows."""
        names = list(columns)
        return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    @staticmethod
    def map_row_to_col(rows: Iterable[Mapping[str, Any]]) -> Columns:
        """Convert rows to columns. Columns are in order of first appearance; a missing value becomes None."""
        listed = list(rows)
        names = {name: None for row in listed for name in row}
        return {name: [row.get(name) for row in listed] for name in names}

    def begin_pass(self) -> None:  # noqa: B027 - optional hook, most subclasses have no state
        """Reset all state before an iteration over a dataset; stateful subclasses override this method."""

    def end_pass(self) -> list[str]:
        """Return report lines on the iteration, such as the number of rows left out; empty by default."""
        return []


class RowPreprocessor(Preprocessor):
    """Converts rows one by one."""

    def __call__(self, rows: Columns) -> Columns:
        """Return the columns of the converted rows."""
        converted: list[Row] = []
        for index, row in enumerate(self.map_col_to_row(rows)):
            try:
                converted.append(self.convert(row))
            except InvalidRow as error:
                raise error.at(index) from error
        return self.map_row_to_col(converted)

    @abstractmethod
    def convert(self, row: Row) -> Row:
        """Return the converted row.

        Raises:
            InvalidRow: the row cannot be read.
        """


class DataFilter(ABC):
    """Decides which rows are kept."""

    @abstractmethod
    def __call__(self, row: Row) -> bool:
        """Return whether the row is kept.

        Raises:
            InvalidRow: the row cannot be read.
        """

    def begin_pass(self) -> None:  # noqa: B027 - optional hook, most subclasses have no state
        """Reset all state before an iteration over a dataset; stateful subclasses override this method."""

    def end_pass(self) -> list[str]:
        """Return report lines on the iteration, such as the number of rows left out; empty by default."""
        return []


Filter = DataFilter
"""Alias of `DataFilter`."""


def report_of(function: object) -> list[str]:
    """Return the report of a preprocessor's or filter's `end_pass`; empty for plain functions."""
    return function.end_pass() if isinstance(function, Preprocessor | DataFilter) else []


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return the text in a column.

    Raises:
        InvalidRow: the column is missing or its value is not text.
    """
    value = row.get(column)
    if not isinstance(value, str):
        problem = 'is missing' if value is None else f'must be text, got {type(value).__name__}'
        raise InvalidRow(column, f'{problem}; the row has {", ".join(sorted(row)) or "no columns"}')
    return value


def chat_of(*, system: str | None = None, user: str, assistant: str | None = None) -> list[Message]:
    """Return the messages of a chat with one user message; None and an empty `system` add no message."""
    turns: list[Message] = [Message(role='system', content=system)] if system else []
    turns.append(Message(role='user', content=user))
    if assistant is not None:
        turns.append(Message(role='assistant', content=assistant))
    return turns
