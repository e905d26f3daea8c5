"""Questions about who the model is, answered with a name of your own."""

from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of


class SelfCognitionProcessor(RowPreprocessor):
    """Puts a name and an author into rows of `query` and `response`; gives `messages`."""

    def __init__(self, model_name: str, model_author: str) -> None:
        self.model_name = model_name
        """Takes the place of {{NAME}}."""
        self.model_author = model_author
        """Takes the place of {{AUTHOR}}."""

    def convert(self, row: Row) -> Row:
        """Return the chat of one question and answer."""
        return {
            'messages': chat_of(
                user=self._named(text_of(row, 'query')),
                assistant=self._named(text_of(row, 'response')),
            )
        }

    def _named(self, text: str) -> str:
        return text.replace('{{NAME}}', self.model_name).replace('{{AUTHOR}}', self.model_author)
