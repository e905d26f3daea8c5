"""Preprocessor for GSM8K: grade-school mathematics problems."""

from twinkle.data_format import pack_user_data
from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of
from twinkle.preprocessor.errors import InvalidRow

_SYSTEM = 'Solve the problem step by step. Put only the final number behind "####" in the last line.'


class GSM8KProcessor(RowPreprocessor):
    """Converts `question` and `answer` to `messages`; `user_data` contains the `ground_truth` number as text."""

    def __init__(self, system: str | None = None, *, add_assistant: bool = False) -> None:
        self.system = system or _SYSTEM
        """System message with the format of the answer. Default: the final number after '####' on the last line."""
        self.add_assistant = add_assistant
        """Whether the full answer is added as an assistant message (for SFT). Default: False (for RL)."""

    def convert(self, row: Row) -> Row:
        """Return the chat of one problem.

        Raises:
            InvalidRow: a column is missing or is not text, or the answer does not contain '####'.
        """
        answer = text_of(row, 'answer')
        _, separator, number = answer.rpartition('####')
        if not separator:
            raise InvalidRow('answer', "does not end in '#### <number>'")
        question = text_of(row, 'question')
        return {
            'messages': chat_of(system=self.system, user=question, assistant=answer if self.add_assistant else None),
            'user_data': pack_user_data({'ground_truth': number.strip().replace(',', '')}),
        }
