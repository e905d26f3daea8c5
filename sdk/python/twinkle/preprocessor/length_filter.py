"""Filter rows by the length of a text."""

from twinkle.preprocessor.base import DataFilter, Row, text_of


class TextLengthFilter(DataFilter):
    """Keeps rows in which the length of one column's text is within bounds."""

    def __init__(self, column: str, min_characters: int = 0, max_characters: int | None = None) -> None:
        self.column = column
        """Name of the text column."""
        self.min_characters = min_characters
        """Minimum number of characters. Default: 0."""
        self.max_characters = max_characters
        """Maximum number of characters. Default: None, no limit."""

    def __call__(self, row: Row) -> bool:
        """Return whether the length of the text is within the bounds, inclusive.

        Raises:
            InvalidRow: the column is missing or is not text.
        """
        length = len(text_of(row, self.column))
        return length >= self.min_characters and (self.max_characters is None or length <= self.max_characters)
