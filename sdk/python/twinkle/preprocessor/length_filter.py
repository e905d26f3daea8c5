"""Keep rows of a reasonable size."""

from twinkle.preprocessor.base import DataFilter, Row, text_of


class TextLengthFilter(DataFilter):
    """Keeps rows whose text in one column has a length within bounds."""

    def __init__(self, column: str, min_characters: int = 0, max_characters: int | None = None) -> None:
        self.column = column
        """The column that is measured."""
        self.min_characters = min_characters
        """Fewest characters a row may have."""
        self.max_characters = max_characters
        """Most characters a row may have. Unset: no limit."""

    def __call__(self, row: Row) -> bool:
        """Return whether the text's length is within the bounds."""
        length = len(text_of(row, self.column))
        return length >= self.min_characters and (self.max_characters is None or length <= self.max_characters)
