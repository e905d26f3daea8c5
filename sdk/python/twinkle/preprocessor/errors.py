"""Why rows cannot be rewritten."""


class PreprocessorError(ValueError):
    """A preprocessor that is unknown, was given wrong arguments, or met a row it cannot read."""


class UnknownPreprocessor(PreprocessorError):
    """No preprocessor or filter is registered under this name."""


class InvalidArguments(PreprocessorError):
    """A preprocessor was given arguments its constructor does not take."""


class InvalidRow(PreprocessorError):
    """A row lacks a column, or holds something else than the preprocessor reads."""

    def __init__(self, column: str, problem: str, *, row_index: int = 0) -> None:
        super().__init__(f'rows[{row_index}].{column} {problem}')
        self.column = column
        self.problem = problem
        self.row_index = row_index
        """Zero-based, within what was given to the preprocessor."""

    def at(self, row_index: int) -> 'InvalidRow':
        """Return the same error about the row of this index."""
        return InvalidRow(self.column, self.problem, row_index=row_index)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.column, self.problem, self.row_index)


def _rebuild(column: str, problem: str, row_index: int) -> InvalidRow:
    return InvalidRow(column, problem, row_index=row_index)
