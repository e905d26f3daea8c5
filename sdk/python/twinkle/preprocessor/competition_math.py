"""Competition mathematics."""

from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of


class CompetitionMathProcessor(RowPreprocessor):
    """Reads `problem` and `solution`; gives `messages`."""

    def convert(self, row: Row) -> Row:
        """Return one problem with its solution."""
        return {'messages': chat_of(user=text_of(row, 'problem'), assistant=text_of(row, 'solution'))}
