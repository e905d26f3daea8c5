"""Preprocessor for OlympiadBench: problems in mathematics and physics, in English and Chinese, some with images."""

import re
from typing import Any, Literal, cast

from twinkle.data_format import pack_user_data
from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of, text_of
from twinkle.preprocessor.errors import InvalidArguments, InvalidRow

_SYSTEMS = {
    'en': 'Solve the problem step by step. Write formulas in LaTeX and put your final answer within \\boxed{}.',
    'zh': '请一步一步地解题，公式用 LaTeX 书写，并把最终答案写在 \\boxed{} 中。',  # noqa: RUF001 - Chinese
}
_REFERENCE = re.compile(r'<image_(\d)>')
_IMAGE = '<image>'
_MAX_IMAGES = 9
"""Maximum number of images of a problem: the last image column of the dataset is `image_9`."""
_GRADING = ('error', 'unit', 'answer_type', 'is_multiple_answer')
"""Columns that define how answers are compared."""


class OlympiadBenchProcessor(RowPreprocessor):
    """Converts `question`, `final_answer` and optional `context`, `solution` and images to a prompt.

    `user_data` contains `ground_truth` (the final answers joined by commas), `solution`, and, if the row has them,
    `error`, `unit`, `answer_type` and `is_multiple_answer`. Proof problems have no final answer and raise an error;
    remove them with a filter first.
    """

    def __init__(self, system: str | None = None, language: Literal['en', 'zh'] = 'en') -> None:
        """Set the system message.

        Args:
            system: instructions for the format of the answer. Default: LaTeX with the final answer in a box.
            language: language of the default instructions, 'en' or 'zh'. Default: 'en'.

        Raises:
            InvalidArguments: the language is not supported.
        """
        if language not in _SYSTEMS:
            raise InvalidArguments(f'language must be one of {sorted(_SYSTEMS)}, got {language!r}')
        self.system = system or _SYSTEMS[language]
        self.language = language

    def convert(self, row: Row) -> Row:
        """Return the prompt of one problem, with its context before the question.

        Raises:
            InvalidRow: a column is missing or malformed, or the question refers to a missing image.
        """
        context = text_of(row, 'context') if row.get('context') else ''
        question = '\n\n'.join(part for part in (context, text_of(row, 'question')) if part)
        user, images = _with_placeholders(row, question)
        graded = {name: row[name] for name in _GRADING if isinstance(row.get(name), str | bool | int | float)}
        solution = '\n\n'.join(_texts(row, 'solution')) if row.get('solution') else ''
        converted: Row = {
            'messages': chat_of(system=self.system, user=user),
            'user_data': pack_user_data(
                {'ground_truth': ', '.join(_texts(row, 'final_answer')), 'solution': solution, **graded}
            ),
        }
        return {**converted, 'images': images} if images else converted


def _texts(row: Row, column: str) -> list[str]:
    value = row.get(column)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in cast('list[Any]', texts)):
        raise InvalidRow(column, 'must be a string or a non-empty list of strings')
    return cast('list[str]', texts)


def _with_placeholders(row: Row, question: str) -> tuple[str, list[Any]]:
    """Return the question with one placeholder per image, and the images in the order of their placeholders."""
    named = {number: row.get(f'image_{number}') for number in range(1, _MAX_IMAGES + 1)}
    given = {number: image for number, image in named.items() if image is not None}
    mentioned = [int(number) for number in _REFERENCE.findall(question)]
    for number in mentioned:
        if number not in given:
            raise InvalidRow(f'image_{number}', 'is missing, but the question refers to it')
    first = [number for number in given if number not in mentioned]
    text = _IMAGE * len(first) + _REFERENCE.sub(_IMAGE, question)
    return text, [given[number] for number in [*first, *mentioned]]
