"""Errors of creating, changing and reading datasets. Messages explain how to fix the problem."""

from dataclasses import KW_ONLY

from twinkle.errors import error_class


class DatasetError(ValueError):
    """A dataset does not support the requested action."""


@error_class('{problem}')
class NotReady(DatasetError):
    """A required earlier step is missing (such as a template before `encode`), or a later step was already done."""

    problem: str
    _: KW_ONLY
    needs: str = ''
    """Missing step, such as 'set_template'; empty if a later step was already done."""


class UnreadableFile(DatasetError):
    """A file cannot be read or written in its format, or the format is unknown."""


@error_class()
class InvalidExample(DatasetError):
    """A row cannot be converted to tokens."""

    row_index: int
    """Zero-based index of the row in its dataset."""
    field: str
    """Path within the row, such as `messages[1].role`; empty for the row itself."""
    problem: str
    """Description of the problem and its fix."""

    def __str__(self) -> str:
        path = f'rows[{self.row_index}].{self.field}' if self.field else f'rows[{self.row_index}]'
        return f'{path} {self.problem}'
