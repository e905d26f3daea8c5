"""Unit tests of rewards that read the text of completions: tags, numbers, words, lengths and derivations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.data_format import boxed_answers
from twinkle.preprocessor import CountdownProcessor, GSM8KProcessor, OlympiadBenchProcessor
from twinkle.reward import (
    CountDownAccuracy,
    F1Reward,
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    InvalidRewardInput,
    LengthReward,
    OlympiadBenchAccuracyReward,
    OlympiadBenchFormatReward,
    OlympiadBenchQualityReward,
)
from twinkle.reward.number import read_number


def chats(*completions: object, **more: object) -> list[dict[str, object]]:
    """Return one trajectory per completion."""
    return [{'messages': [{'role': 'assistant', 'content': completion}], **more} for completion in completions]


def answered(row: dict[str, object], completion: str) -> dict[str, object]:
    """Return a preprocessed row with a completion appended."""
    return {**row, 'messages': [*row['messages'], {'role': 'assistant', 'content': completion}]}


def test_thinking_comes_before_the_answer() -> None:
    """The format reward requires all four tags in order, or three tags if the prompt opens the thinking."""
    completions = [
        '<think>a</think><answer>b</answer>',
        '<think>\n</think>\n\nso <answer></answer>.',
        '<answer>b</answer><think>a</think>',
        '<think>a<answer>b</answer>',
        '',
    ]
    assert FormatReward()(chats(*completions), []) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert FormatReward()(chats('a</think><answer>b</answer>')) == [0.0]
    assert FormatReward(prompt_opens_think=True)(chats('a</think><answer>b</answer>')) == [1.0]


def test_completions_are_read_in_every_form() -> None:
    """Content parts and separate thinking are supported, and the last assistant turn is the completion."""
    parts = [{'type': 'image'}, {'type': 'text', 'text': '<think>a</think><answer>'}, {'text': 'b</answer>'}]
    apart = {'role': 'assistant', 'reasoning_content': 'a', 'content': '<answer>b</answer>'}
    turns = [{'role': 'assistant', 'content': 'no'}, apart, {'role': 'tool', 'content': 'x'}]
    none = {'messages': [{'role': 'user', 'content': '<think>a</think><answer>b</answer>'}]}
    assert FormatReward()([*chats(parts), {'messages': turns}, none]) == [1.0, 1.0, 0.0]
    for broken in ({}, {'messages': None}, {'messages': 'text'}, None):
        with pytest.raises(InvalidRewardInput) as caught:
            FormatReward()([*chats('a'), broken])
        assert caught.value.field == 'trajectories[1].messages'


def test_gsm8k_scores_preprocessed_rows() -> None:
    """The GSM8K reward compares the last marked number after the thinking by value."""
    columns = GSM8KProcessor()({'question': ['?'] * 8, 'answer': ['so 1,200.\n#### 1,200'] * 8})
    completions = [
        'It is 1200.\n#### 1,200',
        r'\boxed{1200.0}',
        r'#### 7, no: \boxed{\$1200}',
        '<think>#### 1200</think> #### 12',
        '1200',
        '#### 1200 apples',
        '',
        '<think>so #### 1200',
    ]
    rows = [
        answered({'messages': messages, 'user_data': data}, completion)
        for messages, data, completion in zip(columns['messages'], columns['user_data'], completions, strict=True)
    ]
    assert GSM8KAccuracyReward()(rows) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert GSM8KFormatReward()(rows) == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def test_ground_truths_can_be_passed_separately() -> None:
    """Ground truths may be values, solutions or trajectories, one per completion."""
    reward = GSM8KAccuracyReward()
    assert reward(chats('#### 3', '#### 4'), ['3', 'so\n#### 4']) == [1.0, 1.0]
    assert reward(chats('#### 3'), [{'user_data': [('ground_truth', '3')]}]) == [1.0]
    assert reward(chats('#### 3', user_data=[{'ground_truth': 3}]), []) == [1.0]
    assert reward(chats('#### 3', user_data={'ground_truth': 3})) == [1.0]
    with pytest.raises(InvalidRewardInput) as caught:
        reward(chats('#### 3'), ['3', '4'])
    assert caught.value.field == 'ground_truths'
    for user_data in ([('other', '1')], [('ground_truth', 'null')], [7, 'ground_truth', ()], 'ground_truth', 7, None):
        with pytest.raises(InvalidRewardInput) as caught:
            reward(chats('#### 3', user_data=user_data))
        assert caught.value.field == 'trajectories[0].user_data'
    with pytest.raises(InvalidRewardInput) as caught:
        reward(chats('#### 3'), [None])
    assert caught.value.field == 'ground_truths[0]'


@pytest.mark.parametrize(
    'text', ['1e999999999', '1' * 100, 'nan', 'inf', '1/0', '', '.', '-', '\uff11\uff12', '1,2', '0x1f']
)
def test_other_text_is_not_read_as_a_number(text: str) -> None:
    """Text that is not a plain number, for example a number with an exponent, gives None."""
    assert read_number(text) is None


@pytest.mark.parametrize('text', [r'\$18', r'$\$18$', '$18', '18', r'\$18.00', r' \$ 18. '])
def test_dollar_signs_around_a_number_are_ignored(text: str) -> None:
    """Plain, escaped and doubled dollar signs around a number are ignored."""
    assert read_number(text) == 18


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        (r'\boxed{1} \boxed{2}', ['1', '2']),
        (r'\fbox{1} \boxed {2} \box{3}', ['1', '2']),
        (r'\boxed{1 and so \boxed{2}', ['2']),
        (r'\boxed{ {1 } so \boxed{\frac{1}{2}}', [r'\frac{1}{2}']),
        (r'\boxed{\boxed{4}} } }', [r'\boxed{4}']),
        (r'\boxed{\{1, 2\}}', [r'\{1, 2\}']),
        (r'\boxed{x \} y}', [r'x \} y']),
        (r'\boxed{[1, \{ 2]} and more', [r'[1, \{ 2]']),
        (r'\boxed {7}', ['7']),
        (r'boxed{7} \\boxed{7} \boxed', []),
        (r'\boxed{' * 20_000 + '7}', ['7']),
        (r'\boxed{' * 20_000 + '7' + '}' * 20_000, [r'\boxed{' * 19_999 + '7' + '}' * 19_999]),
    ],
    ids=range(12),
)
def test_boxes_are_read(text: str, expected: list[str]) -> None:
    """Every closed box is read, even if another box is not closed."""
    assert boxed_answers(text) == expected


@given(st.fractions(max_denominator=10**6).filter(lambda value: abs(value) < 10**12))
def test_numbers_are_read_exactly(value: object) -> None:
    """Fractions and decimals with separators are read exactly."""
    assert read_number(str(value)) == value
    assert read_number(f'${float(round(value)):,.2f}') == round(value)


@pytest.mark.parametrize(
    ('answer', 'expected'),
    [
        ('(19 + 3) * 2 - 2', 1.0),
        ('(19 + 3) * 2 - 2 = 42', 1.0),
        ('2 * (3 + 19) - 2', 1.0),
        ('19 + 3 * 2 + 2', 0.0),
        ('42', 0.0),
        ('19 + 19 + 3 + 1', 0.0),
        ('(19 + 3) * 2 - 2 / 1', 0.0),
        ('(19 + 3) * 2 - 2.0', 0.0),
        ('19 // 3 * 2 * 2', 0.0),
        ('9 ** 9 ** 9', 0.0),
        ('19 / (3 - 3)', 0.0),
        ('__import__("os").abort()', 0.0),
        ('(' * 250, 0.0),
        ('-' * 250 + '1', 0.0),
        ('1' * 300, 0.0),
        ('', 0.0),
    ],
)
def test_countdown_answers_reach_the_target_with_each_number_once(answer: str, expected: float) -> None:
    """Only an arithmetic expression over the given numbers that reaches the target scores 1."""
    columns = CountdownProcessor()({'target': [42], 'nums': [[19, 3, 2, 2]]})
    row = {'messages': columns['messages'][0], 'user_data': columns['user_data'][0]}
    completion = f'<think>maybe <answer>1</answer></think><answer>{answer}</answer>'
    assert CountDownAccuracy()([answered(row, completion)], []) == [expected]


def test_countdown_ignores_answers_in_the_thinking() -> None:
    """An answer inside closed or unclosed thinking scores 0."""
    game = {'target': 3, 'nums': [1, 2]}
    completions = ['<think><answer>1 + 2</answer></think>', '<think><answer>1 + 2</answer>', '<answer>1 + 2</answer>']
    assert CountDownAccuracy()(chats(*completions, user_data=[game])) == [0.0, 0.0, 1.0]


def test_countdown_divides_exactly() -> None:
    """Division is exact, so 1/3 + 1/3 + 1/3 equals 1; games may be mappings in `user_data` or separate arguments."""
    game = {'target': 1, 'nums': [1, 3, 1, 3, 1, 3]}
    completion = '<answer>1/3 + 1/3 + 1/3</answer>'
    assert CountDownAccuracy()(chats(completion, user_data=[game])) == [1.0]
    assert CountDownAccuracy()(chats(completion), [game]) == [1.0]
    with pytest.raises(InvalidRewardInput):
        CountDownAccuracy()(chats(completion))


def test_f1_matches_squad() -> None:
    """The F1 score compares normalized words, uses the best of several truths and ignores the thinking."""
    reward = F1Reward()
    assert reward(chats('<answer>The red big car!</answer>'), ['a red car']) == [pytest.approx(0.8)]
    assert reward(chats('<think>red car</think> blue', '<think>red car'), ['red car'] * 2) == [0.0, 0.0]
    assert reward(chats(r'\boxed{Paris}'), [['London', 'paris']]) == [1.0]
    assert reward(chats('北京市'), ['北京。']) == [pytest.approx(0.8)]
    assert reward(chats('', 'word'), ['', '']) == [1.0, 0.0]


def test_length_is_punished_near_its_limit() -> None:
    """The penalty follows DAPO, eq. 13; lengths come from labels or `completion_lengths`, which must exist."""
    reward = LengthReward(max_length=10, cache_length=4)
    lengths = [0, 6, 7, 9, 10, 11, 99]
    assert reward(chats(*[''] * 7), completion_lengths=lengths) == [0, 0, -0.25, -0.75, -1, -1, -1]
    assert reward([{'labels': np.array([-100, *range(7), -100])}]) == [-0.25]
    for options in ((0, 1), (4, 5), (4, 0)):
        with pytest.raises(InvalidRewardInput):
            LengthReward(*options)
    with pytest.raises(InvalidRewardInput):
        reward(chats(''))
    with pytest.raises(InvalidRewardInput):
        reward(chats(''), completion_lengths=[1, 2])


@pytest.mark.parametrize(
    ('completion', 'truth', 'more', 'expected'),
    [
        (r'\boxed{\dfrac{3}{2}}', '$1.5$', {}, 1.0),
        (r'\boxed{5\text{ m}}', '5m', {}, 1.0),
        (r'\boxed{x=2}', '$x = 2$', {}, 1.0),
        (r'\boxed{11}', '10', {}, 0.5 * math.exp(-0.5)),
        (r'\boxed{11}', '10', {'error': '1'}, 1.0),
        (r'\boxed{10.1}', '10', {'error': '1e-1'}, 1.0),
        (r'\boxed{10.2}', '10', {'error': 'nan'}, 0.5 * math.exp(-0.1)),
        (r'\boxed{10 \mathrm{m/s}}', '$10$', {'unit': 'm/s', 'is_multiple_answer': 'False'}, 1.0),
        (r'\boxed{y}', 'x', {}, 0.0),
        ('10', '10', {}, 0.0),
        (r'<think>\boxed{10}', '10', {}, 0.0),
        (r'\boxed{\$18}', '18', {}, 1.0),
        (r'\boxed{10\%}', '10', {}, 1.0),
        (r'\boxed{1}', '0', {}, 0.0),
        (r'\boxed{3},\boxed{2}', '2,3', {'is_multiple_answer': True}, 1.0),
        (r'\boxed{(1,2),(3,4)}', '(3,4),(1,2)', {'is_multiple_answer': True}, 1.0),
        (r'\boxed{2}', '2,3', {'is_multiple_answer': True}, 0.5),
        (r'\boxed{1,2,3,4}', '2,3', {'is_multiple_answer': True}, 0.5),
        (r'\boxed{2,2}', '2,3', {'is_multiple_answer': True}, 0.5),
    ],
)
def test_olympiad_answers_are_scored_by_correctness(
    completion: str, truth: str, more: dict[str, object], expected: float
) -> None:
    """Formatting is ignored, nearly correct answers get partial scores, and extra answers reduce the score."""
    trajectories = chats(completion, user_data={'ground_truth': truth, **more})
    assert OlympiadBenchAccuracyReward()(trajectories) == [pytest.approx(expected)]


def test_olympiad_scores_preprocessed_rows() -> None:
    """Several final answers in a different order score 1."""
    row = {'question': '?', 'final_answer': ['$2$', '$\\frac{1}{3}$'], 'is_multiple_answer': True, 'error': None}
    converted = OlympiadBenchProcessor().convert(row)
    assert OlympiadBenchAccuracyReward()([answered(converted, r'\boxed{1/3, 2}')]) == [1.0]


def test_olympiad_format_prefers_one_box_at_the_end() -> None:
    """An answer that is boxed once, at the end, scores highest."""
    completions = [
        r'so \boxed{2}',
        r'\boxed{2}' + '.' * 300,
        r'\boxed{2}\boxed{3}',
        r'\boxed{1}\boxed{2}\boxed{3}',
        '2',
        r'<think>\boxed{2}',
        r'<think>\boxed{1} or \boxed{3}</think>\boxed {2}',
    ]
    assert OlympiadBenchFormatReward()(chats(*completions)) == pytest.approx([1.0, 0.7, 0.7, 0.4, 0.0, 0.0, 1.0])


def test_olympiad_quality_depends_on_steps_length_and_variety() -> None:
    """A derivation scores higher than a bare answer, which scores higher than repeated words."""
    steps = [f'Step {n}: since a_{n} = {n} * {n + 1}, we have b_{n} = a_{n} - {n} = {n * n}.' for n in range(8)]
    derivation = ' '.join(steps) + r' Therefore the answer is \boxed{7}.'
    scores = OlympiadBenchQualityReward()(chats(derivation, r'\boxed{7}', 'again and ' * 2000, ''))
    assert scores[0] > 0.9
    assert scores[0] > scores[1] > scores[2] > scores[3] == 0.0


@given(st.text(max_size=300))
def test_any_text_can_be_scored(text: str) -> None:
    """Every text gets a score within the range of the reward."""
    row = chats(text, user_data={'ground_truth': '3', 'target': 3, 'nums': [1, 2]}, labels=[1, -100])
    rewards = [
        *(FormatReward(), GSM8KAccuracyReward(), GSM8KFormatReward(), CountDownAccuracy(), F1Reward()),
        *(OlympiadBenchAccuracyReward(), OlympiadBenchFormatReward(), OlympiadBenchQualityReward()),
    ]
    for reward in rewards:
        (score,) = reward(row)
        assert 0 <= score <= 1
