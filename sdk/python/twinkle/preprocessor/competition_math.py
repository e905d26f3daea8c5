"""Competition mathematics."""

import re

from twinkle.data_format import pack_value
from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of
from twinkle.preprocessor.errors import InvalidRow

_SYSTEM = 'Reason step by step, and put your final answer within \\boxed{}.'
_TOKEN = re.compile(r'\\f?boxed\s*\{|\\[\s\S]|[{}]')
"""A box that opens, a backslash with what it escapes, or a brace."""


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
        answer = text_of(row, 'answer') if row.get('answer') is not None else boxed_answer(solution)
        if answer is None:
            raise InvalidRow('solution', 'has no \\boxed{} answer, and the row has no column answer')
        return {
            'messages': chat_of(system=self.system, user=text_of(row, 'problem')),
            'user_data': [pack_value('ground_truth', answer.strip()), pack_value('solution', solution)],
        }


def boxed_answer(text: str) -> str | None:
    r"""Return what stands within the last \boxed{} whose braces close, else None. Linear in the text's length."""
    answer: str | None = None
    open_at: list[int | None] = []
    for token in _TOKEN.finditer(text):
        if token.group().endswith('{') and not token.group().startswith('\\{'):
            open_at.append(token.end() if 'boxed' in token.group() else None)
        elif token.group() == '}' and open_at:
            begin = open_at.pop()
            answer = text[begin : token.start()] if begin is not None else answer
    return answer
