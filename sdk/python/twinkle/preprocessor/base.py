"""What a preprocessor and a filter are."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinkle.data_format import Message
from twinkle.preprocessor.errors import InvalidRow

Row = dict[str, Any]
Columns = dict[str, list[Any]]


class Preprocessor(ABC):
    """Rewrites rows, a batch at a time.

    What it returns is all that a row has afterwards: a column that is to stay is returned.
    There may be more or fewer rows than before. Subclasses override `__call__`, or
    `RowPreprocessor.convert` where rows are rewritten one by one.
    """

    @abstractmethod
    def __call__(self, rows: Columns) -> Columns:
        """Return columns, all equally long, from columns.

        Raises:
            InvalidRow: a row cannot be read.
        """

    @staticmethod
    def map_col_to_row(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
        """Return the rows of columns."""
        names = list(columns)
        return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    @staticmethod
    def map_row_to_col(rows: Iterable[Mapping[str, Any]]) -> Columns:
        """Return the columns of rows; a value that a row does not have is None."""
        listed = list(rows)
        names = {name: None for row in listed for name in row}
        return {name: [row.get(name) for row in listed] for name in names}

    def begin_pass(self) -> None:  # noqa: B027 - most remember nothing
        """Forget the rows seen before: a pass over a dataset begins. Override where rows are remembered."""

    def end_pass(self) -> list[str]:
        """Return what the caller should know of the rows seen since the pass began: those left out, and why."""
        return []


class RowPreprocessor(Preprocessor):
    """Rewrites rows one by one."""

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
        """Return the new row.

        Raises:
            InvalidRow: it cannot be read.
        """


class DataFilter(ABC):
    """Decides which rows stay."""

    @abstractmethod
    def __call__(self, row: Row) -> bool:
        """Return whether the row stays.

        Raises:
            InvalidRow: it cannot be read.
        """

    def begin_pass(self) -> None:  # noqa: B027 - most remember nothing
        """Forget the rows seen before: a pass over a dataset begins. Override where rows are remembered."""

    def end_pass(self) -> list[str]:
        """Return what the caller should know of the rows seen since the pass began: those left out, and why."""
        return []


Filter = DataFilter
"""The same, by the shorter of its two names."""


def report_of(function: object) -> list[str]:
    """Return what `end_pass` of a preprocessor or filter tells; plain functions tell nothing."""
    return function.end_pass() if isinstance(function, Preprocessor | DataFilter) else []


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return a column that must be text.

    Raises:
        InvalidRow: it is missing or something else.
    """
    value = row.get(column)
    if not isinstance(value, str):
        found = 'is missing' if value is None else f'must be text, got {type(value).__name__}'
        raise InvalidRow(column, f'{found}; the row has {", ".join(sorted(row)) or "no columns"}')
    return value


def chat_of(*, system: str | None = None, user: str, assistant: str | None = None) -> list[Message]:
    """Return the messages of one exchange."""
    turns: list[Message] = [Message(role='system', content=system)] if system else []
    turns.append(Message(role='user', content=user))
    if assistant is not None:
        turns.append(Message(role='assistant', content=assistant))
    return turns
