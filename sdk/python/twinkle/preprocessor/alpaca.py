"""Preprocessor for instructions in the Alpaca format."""

from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of


class AlpacaProcessor(RowPreprocessor):
    """Converts `instruction`, `output` and optional `input` and `system` to `messages`."""

    def convert(self, row: Row) -> Row:
        """Return the chat of one instruction; a non-empty input follows the instruction on the next line.

        Raises:
            InvalidRow: a required column is missing, or a column is not text.
        """
        instruction = text_of(row, 'instruction')
        given = text_of(row, 'input') if row.get('input') else ''
        system = text_of(row, 'system') if row.get('system') else None
        question = f'{instruction}\n{given}' if given else instruction
        return {'messages': chat_of(system=system, user=question, assistant=text_of(row, 'output'))}
