"""Preprocessors for competition mathematics problems."""

from twinkle.data_format import boxed_answers, pack_user_data
from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of
from twinkle.preprocessor.errors import InvalidRow

_SYSTEM = 'Reason step by step, and put your final answer within \\boxed{}.'


class CompetitionMathProcessor(RowPreprocessor):
    """Converts `problem` and `solution` to `messages`."""

    def convert(self, row: Row) -> Row:
        """Return the chat of one problem and its solution.

        Raises:
            InvalidRow: a column is missing or is not text.
        """
        return {'messages': chat_of(user=text_of(row, 'problem'), assistant=text_of(row, 'solution'))}


class CompetitionMathGRPOProcessor(RowPreprocessor):
    r"""Converts rows with `problem`, `solution` and an optional `answer` to prompts with `user_data` for the reward.

    `user_data` contains `solution` and `ground_truth`. The ground truth is the `answer` or, without `answer`, the
    content of the last \boxed{} in the solution.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system or _SYSTEM
        r"""System message with the format of the answer. Default: the final answer in a \boxed{}."""

    def convert(self, row: Row) -> Row:
        r"""Return the prompt of one problem.

        Raises:
            InvalidRow: a column is missing or is not text, or the row has neither an `answer` nor an answer in \boxed{}
                in its solution.
        """
        solution = text_of(row, 'solution')
        answers = [text_of(row, 'answer')] if row.get('answer') is not None else boxed_answers(solution)
        if not answers:
            raise InvalidRow('solution', 'has no \\boxed{} answer, and the row has no column `answer`; add one of them')
        return {
            'messages': chat_of(system=self.system, user=text_of(row, 'problem')),
            'user_data': pack_user_data({'ground_truth': answers[-1].strip(), 'solution': solution}),
        }
