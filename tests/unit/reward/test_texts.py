"""Rewards of what completions say: tags, marked numbers, words, lengths, and how derivations look."""

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


def said(*completions: object, **more: object) -> list[dict[str, object]]:
    """Return trajectories of completions."""
    return [{'messages': [{'role': 'assistant', 'content': completion}], **more} for completion in completions]


def answered(row: dict[str, object], completion: str) -> dict[str, object]:
    """Return what a preprocessor made, with a completion behind it."""
    return {**row, 'messages': [*row['messages'], {'role': 'assistant', 'content': completion}]}


def test_thinking_comes_before_the_answer() -> None:
    """All four tags in their order, whatever is between; both ways of calling."""
    completions = [
        '<think>a</think><answer>b</answer>',
        '<think>\n</think>\n\nso <answer></answer>.',
        '<answer>b</answer><think>a</think>',
        '<think>a<answer>b</answer>',
        '',
    ]
    assert FormatReward()(said(*completions), []) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert FormatReward()(said('a</think><answer>b</answer>')) == [0.0]
    assert FormatReward(prompt_opens_think=True)(said('a</think><answer>b</answer>')) == [1.0]


def test_completions_are_read_in_every_form() -> None:
    """Parts of text, thinking kept apart, the last turn of the assistant; nothing said scores nothing."""
    parts = [{'type': 'image'}, {'type': 'text', 'text': '<think>a</think><answer>'}, {'text': 'b</answer>'}]
    apart = {'role': 'assistant', 'reasoning_content': 'a', 'content': '<answer>b</answer>'}
    turns = [{'role': 'assistant', 'content': 'no'}, apart, {'role': 'tool', 'content': 'x'}]
    none = {'messages': [{'role': 'user', 'content': '<think>a</think><answer>b</answer>'}]}
    assert FormatReward()([*said(parts), {'messages': turns}, none]) == [1.0, 1.0, 0.0]
    for broken in ({}, {'messages': None}, {'messages': 'text'}, None):
        with pytest.raises(InvalidRewardInput) as caught:
            FormatReward()([*said('a'), broken])
        assert caught.value.field == 'trajectories[1].messages'


def test_gsm8k_scores_what_its_preprocessor_makes() -> None:
    """The number is read as a number, the last marked one, behind the thinking."""
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


def test_ground_truths_come_from_beside_too() -> None:
    """As values, as whole solutions, as trajectories; as many as there are completions."""
    reward = GSM8KAccuracyReward()
    assert reward(said('#### 3', '#### 4'), ['3', 'so\n#### 4']) == [1.0, 1.0]
    assert reward(said('#### 3'), [{'user_data': [('ground_truth', '3')]}]) == [1.0]
    assert reward(said('#### 3', user_data=[{'ground_truth': 3}]), []) == [1.0]
    assert reward(said('#### 3', user_data={'ground_truth': 3})) == [1.0]
    with pytest.raises(InvalidRewardInput) as caught:
        reward(said('#### 3'), ['3', '4'])
    assert caught.value.field == 'ground_truths'
    for user_data in ([('other', '1')], [('ground_truth', 'null')], [7, 'ground_truth', ()], 'ground_truth', 7, None):
        with pytest.raises(InvalidRewardInput) as caught:
            reward(said('#### 3', user_data=user_data))
        assert caught.value.field == 'trajectories[0].user_data'
    with pytest.raises(InvalidRewardInput) as caught:
        reward(said('#### 3'), [None])
    assert caught.value.field == 'ground_truths[0]'


@pytest.mark.parametrize(
    'text', ['1e999999999', '1' * 100, 'nan', 'inf', '1/0', '', '.', '-', '\uff11\uff12', '1,2', '0x1f']
)
def test_what_is_no_plain_number_is_none(text: str) -> None:
    """Exponents above all, whose value fills the memory."""
    assert read_number(text) is None


@pytest.mark.parametrize('text', [r'\$18', r'$\$18$', '$18', '18', r'\$18.00', r' \$ 18. '])
def test_a_dollar_is_no_part_of_a_number(text: str) -> None:
    """However it is written."""
    assert read_number(text) == 18


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        (r'\boxed{1} \boxed{2}', ['1', '2']),
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
    ids=range(11),
)
def test_boxes_are_read(text: str, expected: list[str]) -> None:
    """Each that is closed, though another is not."""
    assert boxed_answers(text) == expected


@given(st.fractions(max_denominator=10**6).filter(lambda value: abs(value) < 10**12))
def test_numbers_are_read_exactly(value: object) -> None:
    """As fractions, and as decimals with separators."""
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
    """As arithmetic, never as a program."""
    columns = CountdownProcessor()({'target': [42], 'nums': [[19, 3, 2, 2]]})
    row = {'messages': columns['messages'][0], 'user_data': columns['user_data'][0]}
    completion = f'<think>maybe <answer>1</answer></think><answer>{answer}</answer>'
    assert CountDownAccuracy()([answered(row, completion)], []) == [expected]


def test_countdown_answers_in_thought_are_none() -> None:
    """Where the thinking ends, and where it never does."""
    game = {'target': 3, 'nums': [1, 2]}
    completions = ['<think><answer>1 + 2</answer></think>', '<think><answer>1 + 2</answer>', '<answer>1 + 2</answer>']
    assert CountDownAccuracy()(said(*completions, user_data=[game])) == [0.0, 0.0, 1.0]


def test_countdown_divides_exactly() -> None:
    """Thirds add up to one; mappings in `user_data` and games beside are read too."""
    game = {'target': 1, 'nums': [1, 3, 1, 3, 1, 3]}
    completion = '<answer>1/3 + 1/3 + 1/3</answer>'
    assert CountDownAccuracy()(said(completion, user_data=[game])) == [1.0]
    assert CountDownAccuracy()(said(completion), [game]) == [1.0]
    with pytest.raises(InvalidRewardInput):
        CountDownAccuracy()(said(completion))


def test_f1_is_that_of_squad() -> None:
    """Two of three words right, of two wanted: precision 2/3, recall 1."""
    reward = F1Reward()
    assert reward(said('<answer>The red big car!</answer>'), ['a red car']) == [pytest.approx(0.8)]
    assert reward(said('<think>red car</think> blue', '<think>red car'), ['red car'] * 2) == [0.0, 0.0]
    assert reward(said(r'\boxed{Paris}'), [['London', 'paris']]) == [1.0]
    assert reward(said('北京市'), ['北京。']) == [pytest.approx(0.8)]
    assert reward(said('', 'word'), ['', '']) == [1.0, 0.0]


def test_length_is_punished_near_its_limit() -> None:
    """DAPO, eq. 13, with 10 tokens of which 4 are the cache; labels or lengths tell the tokens."""
    reward = LengthReward(max_length=10, cache_length=4)
    lengths = [0, 6, 7, 9, 10, 11, 99]
    assert reward(said(*[''] * 7), completion_lengths=lengths) == [0, 0, -0.25, -0.75, -1, -1, -1]
    assert reward([{'labels': np.array([-100, *range(7), -100])}]) == [-0.25]
    for options in ((0, 1), (4, 5), (4, 0)):
        with pytest.raises(InvalidRewardInput):
            LengthReward(*options)
    with pytest.raises(InvalidRewardInput):
        reward(said(''))
    with pytest.raises(InvalidRewardInput):
        reward(said(''), completion_lengths=[1, 2])


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
def test_olympiad_answers_are_right_near_or_a_share(
    completion: str, truth: str, more: dict[str, object], expected: float
) -> None:
    """Without their dress, within their error; giving many answers does not pay."""
    trajectories = said(completion, user_data={'ground_truth': truth, **more})
    assert OlympiadBenchAccuracyReward()(trajectories) == [pytest.approx(expected)]


def test_olympiad_scores_what_its_preprocessor_makes() -> None:
    """Several final answers, in another order."""
    row = {'question': '?', 'final_answer': ['$2$', '$\\frac{1}{3}$'], 'is_multiple_answer': True, 'error': None}
    made = OlympiadBenchProcessor().convert(row)
    assert OlympiadBenchAccuracyReward()([answered(made, r'\boxed{1/3, 2}')]) == [1.0]


def test_olympiad_answers_are_given_clearly() -> None:
    """Boxed, at the end, and once."""
    completions = [
        r'so \boxed{2}',
        r'\boxed{2}' + '.' * 300,
        r'\boxed{2}\boxed{3}',
        r'\boxed{1}\boxed{2}\boxed{3}',
        '2',
        r'<think>\boxed{2}',
        r'<think>\boxed{1} or \boxed{3}</think>\boxed {2}',
    ]
    assert OlympiadBenchFormatReward()(said(*completions)) == pytest.approx([1.0, 0.7, 0.7, 0.4, 0.0, 0.0, 1.0])


def test_olympiad_quality_is_of_steps_length_and_variety() -> None:
    """A derivation scores above a bare answer, and that above the same words over and over; all within 0 and 1."""
    steps = [f'Step {n}: since a_{n} = {n} * {n + 1}, we have b_{n} = a_{n} - {n} = {n * n}.' for n in range(8)]
    derivation = ' '.join(steps) + r' Therefore the answer is \boxed{7}.'
    scores = OlympiadBenchQualityReward()(said(derivation, r'\boxed{7}', 'again and ' * 2000, ''))
    assert scores[0] > 0.9
    assert scores[0] > scores[1] > scores[2] > scores[3] == 0.0


@given(st.text(max_size=300))
def test_no_text_upsets_a_reward(text: str) -> None:
    """Scores stay within their range, whatever a model says."""
    row = said(text, user_data={'ground_truth': '3', 'target': 3, 'nums': [1, 2]}, labels=[1, -100])
    rewards = [
        *(FormatReward(), GSM8KAccuracyReward(), GSM8KFormatReward(), CountDownAccuracy(), F1Reward()),
        *(OlympiadBenchAccuracyReward(), OlympiadBenchFormatReward(), OlympiadBenchQualityReward()),
    ]
    for reward in rewards:
        (score,) = reward(row)
        assert 0 <= score <= 1
