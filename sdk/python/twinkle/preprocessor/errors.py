"""Errors of preprocessing rows."""

from dataclasses import KW_ONLY

from twinkle.errors import error_class


class PreprocessorError(ValueError):
    """A preprocessor is unknown, got invalid arguments, or cannot read a row."""


class UnknownPreprocessor(PreprocessorError):
    """No preprocessor or filter is registered under this name."""


class InvalidArguments(PreprocessorError):
    """A preprocessor got arguments that its constructor does not accept."""


@error_class('rows[{row_index}].{column} {problem}')
class InvalidRow(PreprocessorError):
    """A row lacks a column, or a column contains a value that the preprocessor cannot read."""

    column: str
    """Name of the column or path of the field, such as `messages[1].role`."""
    problem: str
    """Description of the problem."""
    _: KW_ONLY
    row_index: int = 0
    """Zero-based position within the rows given to the preprocessor."""

    def at(self, row_index: int) -> 'InvalidRow':
        """Return a copy of the error with a different row index."""
        return InvalidRow(self.column, self.problem, row_index=row_index)
