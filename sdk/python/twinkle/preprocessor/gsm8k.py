"""Grade-school mathematics."""

from twinkle.data_format import pack_user_data
from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of
from twinkle.preprocessor.errors import InvalidRow

_SYSTEM = 'Solve the problem step by step. Put only the final number behind "####" in the last line.'


class GSM8KProcessor(RowPreprocessor):
    """Reads `question` and `answer`; gives `messages` and, in `user_data`, the `ground_truth` number."""

    def __init__(self, system: str | None = None, *, add_assistant: bool = False) -> None:
        self.system = system or _SYSTEM
        """Tells the model how to write its answer. Unset: a number behind '####'."""
        self.add_assistant = add_assistant
        """Whether the worked answer is part of the chat (for SFT), or only its number is kept (for RL)."""

    def convert(self, row: Row) -> Row:
        """Return one problem."""
        answer = text_of(row, 'answer')
        _, separator, number = answer.rpartition('####')
        if not separator:
            raise InvalidRow('answer', "does not end in '#### <number>'")
        question = text_of(row, 'question')
        return {
            'messages': chat_of(system=self.system, user=question, assistant=answer if self.add_assistant else None),
            'user_data': pack_user_data({'ground_truth': number.strip().replace(',', '')}),
        }
