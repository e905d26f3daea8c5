"""Rows of public datasets become prompts, preference pairs and ground truths."""

from typing import Any

import pytest

from twinkle.data_format import user_data_get
from twinkle.preprocessor import (
    CLEVRProcessor,
    CompetitionMathGRPOProcessor,
    EmojiDPOProcessor,
    InvalidArguments,
    InvalidRow,
    OlympiadBenchProcessor,
    Preprocessor,
    build_preprocessor,
    llm,
)

OLYMPIAD = {
    'question': 'See <image_2>. Find $x$.',
    'context': 'Let $x > 0$.',
    'solution': ['First.', 'Then $x=2$.'],
    'final_answer': ['2'],
    'image_1': 'one',
    'image_2': 'two',
    'image_3': None,
    'unit': 'm',
    'error': None,
    'is_multiple_answer': False,
}


def rows_of(processor: Any, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of a preprocessor for some rows."""
    return Preprocessor.map_col_to_row(processor(Preprocessor.map_row_to_col(rows)))


@pytest.mark.parametrize(
    ('solution', 'answer'),
    [
        (r'So \boxed{\frac{1}{2}}.', r'\frac{1}{2}'),
        (r'\boxed{1} no, \boxed{2}', '2'),
        (r'\fbox{x} and \boxed {\{3\}}', r'\{3\}'),
        (r'\boxed{4} and an open \boxed{5', '4'),
    ],
)
def test_boxed_answers_are_the_ground_truth(solution: str, answer: str) -> None:
    """The content of the last closed box is the ground truth. It may contain nested and escaped braces."""
    (row,) = rows_of(CompetitionMathGRPOProcessor(), {'problem': 'p', 'solution': solution})
    assert user_data_get(row, 'ground_truth') == answer
    assert user_data_get(row, 'solution') == solution
    assert [message['role'] for message in row['messages']] == ['system', 'user']


def test_an_answer_column_has_precedence() -> None:
    """The column `answer` takes precedence over the box; a row without both is refused."""
    row = {'problem': 'p', 'solution': 'no box', 'answer': ' 7 '}
    assert user_data_get(rows_of(CompetitionMathGRPOProcessor(), row)[0], 'ground_truth') == '7'
    with pytest.raises(InvalidRow):
        rows_of(CompetitionMathGRPOProcessor(), {**row, 'answer': None})


def test_a_pair_becomes_two_rows() -> None:
    """The chosen answer of each pair is first, and an error names the row and the column."""
    pairs = [{'question': str(i), 'answer_zh': f'good {i}', 'answer_en': f'bad {i}'} for i in range(2)]
    rows = rows_of(EmojiDPOProcessor('Be nice.'), *pairs)
    assert [row['messages'][-1]['content'] for row in rows] == ['good 0', 'bad 0', 'good 1', 'bad 1']
    assert [user_data_get(row, 'preference') for row in rows] == ['chosen', 'rejected'] * 2
    with pytest.raises(InvalidRow) as caught:
        rows_of(EmojiDPOProcessor(), pairs[0], {'prompt': 'p', 'answer_zh': 'a'})
    assert (caught.value.row_index, caught.value.column) == (1, 'answer_en')


def test_columns_of_pairs_can_be_chosen() -> None:
    """The columns of the question and of both answers can be given by name."""
    init_args = {'prompt_key': 'q', 'chosen_key': 'yes', 'rejected_key': 'no'}
    rows = rows_of(build_preprocessor('EmojiDPOProcessor', init_args), {'q': 'Q', 'yes': 'Y', 'no': 'N'})
    assert [row['messages'][-1]['content'] for row in rows] == ['Y', 'N']


def test_clevr_puts_the_image_first() -> None:
    """The question has one image placeholder, the tagged answer is the ground truth, and invalid rows are refused."""
    row = {'image': b'png', 'problem': 'How many cubes?', 'solution': '<answer> 3 </answer>'}
    (prompt,) = rows_of(CLEVRProcessor(), row)
    assert prompt['messages'][-1]['content'] == '<image>How many cubes?'
    assert (prompt['images'], user_data_get(prompt, 'ground_truth')) == ([b'png'], '3')
    for invalid in ({'image': None}, {'problem': '<image><image>'}, {'solution': 3}):
        with pytest.raises(InvalidRow):
            rows_of(CLEVRProcessor(), {**row, **invalid})


def test_olympiad_images_follow_the_question() -> None:
    """Images that the question does not mention come first; the others follow the order of the question."""
    (prompt,) = rows_of(OlympiadBenchProcessor(), OLYMPIAD)
    assert prompt['messages'][-1]['content'] == '<image>Let $x > 0$.\n\nSee <image>. Find $x$.'
    assert prompt['images'] == ['one', 'two']
    packed = {name: user_data_get(prompt, name) for name in ('ground_truth', 'unit', 'is_multiple_answer', 'error')}
    assert packed == {'ground_truth': '2', 'unit': 'm', 'is_multiple_answer': False, 'error': None}


@pytest.mark.parametrize(
    'invalid', [{'final_answer': None}, {'final_answer': [1]}, {'image_2': None}, {'question': None}]
)
def test_olympiad_rows_without_an_answer_or_image_are_refused(invalid: dict[str, Any]) -> None:
    """A row without a final answer or without an image of its question is refused."""
    with pytest.raises(InvalidRow):
        rows_of(OlympiadBenchProcessor(), {**OLYMPIAD, **invalid})


def test_olympiad_supports_two_languages() -> None:
    """The default system message depends on the language; a language without a message is refused."""
    english, chinese = OlympiadBenchProcessor(), build_preprocessor('OlympiadBenchProcessor', {'language': 'zh'})
    assert isinstance(chinese, OlympiadBenchProcessor)
    assert english.system != chinese.system
    with pytest.raises(InvalidArguments):
        build_preprocessor('OlympiadBenchProcessor', {'language': 'fr'})


def test_the_module_llm_exports_preprocessors() -> None:
    """The module `twinkle.preprocessor.llm` exports `GSM8KProcessor`."""
    assert llm.GSM8KProcessor is type(build_preprocessor('GSM8KProcessor'))
