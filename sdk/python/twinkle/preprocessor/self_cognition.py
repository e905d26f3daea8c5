"""Preprocessor for questions about the model's identity, answered with a given name."""

from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of


class SelfCognitionProcessor(RowPreprocessor):
    """Inserts a name and an author into `query` and `response`, and converts both texts to `messages`."""

    def __init__(self, model_name: str, model_author: str) -> None:
        self.model_name = model_name
        """Replaces `{{NAME}}`."""
        self.model_author = model_author
        """Replaces `{{AUTHOR}}`."""

    def convert(self, row: Row) -> Row:
        """Return the chat of one question and answer.

        Raises:
            InvalidRow: a column is missing or is not text.
        """
        return {
            'messages': chat_of(
                user=self._named(text_of(row, 'query')),
                assistant=self._named(text_of(row, 'response')),
            )
        }

    def _named(self, text: str) -> str:
        return text.replace('{{NAME}}', self.model_name).replace('{{AUTHOR}}', self.model_author)
