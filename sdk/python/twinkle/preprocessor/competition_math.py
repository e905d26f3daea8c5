"""Competition mathematics."""

from twinkle.data_format import boxed_answers, pack_user_data
from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of
from twinkle.preprocessor.errors import InvalidRow

_SYSTEM = 'Reason step by step, and put your final answer within \\boxed{}.'


class CompetitionMathProcessor(RowPreprocessor):
    """Reads `problem` and `solution`; gives `messages`."""

    def convert(self, row: Row) -> Row:
        """Return one problem with its solution."""
        return {'messages': chat_of(user=text_of(row, 'problem'), assistant=text_of(row, 'solution'))}


class CompetitionMathGRPOProcessor(RowPreprocessor):
    r"""Reads `problem` and `solution`, perhaps `answer`; gives a prompt, and in `user_data` what the reward reads.

    That is `ground_truth`, the row's `answer` or what stands in the last \boxed{} of its solution, and `solution`.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system or _SYSTEM
        """Tells the model how to write its answer. Unset: within a box, as the data does."""

    def convert(self, row: Row) -> Row:
        """Return one problem."""
        solution = text_of(row, 'solution')
        answers = [text_of(row, 'answer')] if row.get('answer') is not None else boxed_answers(solution)
        if not answers:
            raise InvalidRow('solution', 'has no \\boxed{} answer, and the row has no column answer')
        return {
            'messages': chat_of(system=self.system, user=text_of(row, 'problem')),
            'user_data': pack_user_data({'ground_truth': answers[-1].strip(), 'solution': solution}),
        }
