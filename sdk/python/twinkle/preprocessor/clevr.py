"""Preprocessor for CLEVR: questions about images of simple shapes."""

import re

from twinkle.data_format import pack_user_data
from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of
from twinkle.preprocessor.errors import InvalidRow

_SYSTEM = (
    'Look at the picture, think within <think> </think>, then give only the final answer within <answer> </answer>.'
)
_IMAGE = '<image>'
_OPEN, _CLOSE = '<answer>', '</answer>'


class CLEVRProcessor(RowPreprocessor):
    """Converts `image`, `problem` and `solution` to a prompt with one item in `images`.

    `user_data` contains `solution` and `ground_truth`. The ground truth is the text in the last answer tags of the
    solution or, without tags, the whole solution.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system or _SYSTEM
        """System message with the format of the answer. Default: a thought followed by the answer in tags."""

    def convert(self, row: Row) -> Row:
        """Return the prompt of one question, with the image before the text unless the text has a placeholder.

        Raises:
            InvalidRow: a column is missing or malformed, or the problem has several placeholders.
        """
        if row.get('image') is None:
            raise InvalidRow('image', 'is missing')
        problem, solution = text_of(row, 'problem'), text_of(row, 'solution')
        question = problem if _IMAGE in problem else f'{_IMAGE}{problem}'
        if question.count(_IMAGE) != 1:
            raise InvalidRow('problem', f'has {question.count(_IMAGE)} placeholders for one image')
        return {
            'messages': chat_of(system=self.system, user=question),
            'images': [row['image']],
            'user_data': pack_user_data({'ground_truth': _answer_of(solution), 'solution': solution}),
        }


def _answer_of(solution: str) -> str:
    _, opening, rest = solution.rpartition(_OPEN)
    answer, closing, _ = rest.partition(_CLOSE)
    return re.sub(r'\s+', ' ', answer if opening and closing else solution).strip()
