"""Preprocessor for preference pairs."""

from twinkle.data_format import pack_user_data
from twinkle.preprocessor.base import Columns, Preprocessor, Row, chat_of, text_of
from twinkle.preprocessor.errors import InvalidRow


class EmojiDPOProcessor(Preprocessor):
    """Converts a question with two answers to two rows of `messages`, in the order that preference losses expect.

    The chosen answer comes first, and `preference` in `user_data` is 'chosen' or 'rejected'. Pairs stay together if the
    batch size is even and the loader does not shuffle. The default columns match the emoji dataset, in which
    `answer_zh` is preferred.
    """

    def __init__(
        self,
        system: str | None = None,
        *,
        prompt_key: str | None = None,
        chosen_key: str = 'answer_zh',
        rejected_key: str = 'answer_en',
    ) -> None:
        self.system = system
        """System message of both chats. Default: none."""
        self.prompt_key = prompt_key
        """Column of the question. Default: `prompt`, or `question` in rows without `prompt`."""
        self.chosen_key = chosen_key
        """Column of the preferred answer."""
        self.rejected_key = rejected_key
        """Column of the rejected answer."""

    def __call__(self, rows: Columns) -> Columns:
        """Return two rows per pair, in order.

        Raises:
            InvalidRow: a row lacks a column or its value is not text.
        """
        converted: list[Row] = []
        for index, row in enumerate(self.map_col_to_row(rows)):
            try:
                converted += self._pair(row)
            except InvalidRow as error:
                raise error.at(index) from error
        return self.map_row_to_col(converted)

    def _pair(self, row: Row) -> list[Row]:
        prompt_key = self.prompt_key or ('prompt' if row.get('prompt') is not None else 'question')
        answers = {'chosen': text_of(row, self.chosen_key), 'rejected': text_of(row, self.rejected_key)}
        prompt = text_of(row, prompt_key)
        return [
            {
                'messages': chat_of(system=self.system, user=prompt, assistant=answer),
                'user_data': pack_user_data({'preference': preference}),
            }
            for preference, answer in answers.items()
        ]
