"""Errors of creating, changing and reading datasets. Messages say how to fix the problem."""

from dataclasses import KW_ONLY

from twinkle.errors import error_class


class DatasetError(ValueError):
    """A dataset does not support the requested action."""


@error_class('{problem}')
class NotReady(DatasetError):
    """An earlier step, such as a template before `encode`, is missing or was done too early."""

    problem: str
    _: KW_ONLY
    needs: str = ''
    """Missing step, such as 'set_template'; empty if a later step was done too early."""


class UnreadableFile(DatasetError):
    """A file does not contain rows of the format that its name claims."""


@error_class()
class InvalidExample(DatasetError):
    """A row cannot be converted to tokens."""

    row_index: int
    """Zero-based."""
    field: str
    """Path within the row, such as `messages[1].role`; empty for the complete row."""
    problem: str
    """Description of the problem and its fix."""

    def __str__(self) -> str:
        place = f'rows[{self.row_index}].{self.field}' if self.field else f'rows[{self.row_index}]'
        return f'{place} {self.problem}'
