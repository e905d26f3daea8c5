"""Pairs of answers of which one is preferred."""

from twinkle.data_format import pack_user_data
from twinkle.preprocessor.base import Columns, Preprocessor, Row, chat_of, text_of
from twinkle.preprocessor.errors import InvalidRow


class EmojiDPOProcessor(Preprocessor):
    """Reads a question with two answers; gives two rows of `messages`, the chosen one first, as preference losses read.

    `user_data` says which is which under `preference`: 'chosen' or 'rejected'. Pairs stay together in an even batch
    of a loader that does not shuffle. The defaults are the columns of the emoji dataset, which prefers `answer_zh`.
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
        """System message of both. Unset: none."""
        self.prompt_key = prompt_key
        """Column of the question. Unset: `prompt`, or where a row has none `question`."""
        self.chosen_key = chosen_key
        """Column of the answer that is preferred."""
        self.rejected_key = rejected_key
        """Column of the other answer."""

    def __call__(self, rows: Columns) -> Columns:
        """Return twice as many rows: each pair in turn."""
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
