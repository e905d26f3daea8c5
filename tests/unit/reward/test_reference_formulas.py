"""Compares rewards with independent implementations of the formulas in papers, on generated texts."""

import re
import string
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.reward import CountDownAccuracy, F1Reward, LengthReward

Expression = tuple[str, Fraction | None, list[int]]
"""An expression, its value (None if it divides by zero), and its numbers."""
OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    '+': lambda a, b: a + b,
    '-': lambda a, b: a - b,
    '*': lambda a, b: a * b,
    '/': lambda a, b: a / b,
}


def joined(parts: tuple[Expression, str, Expression]) -> Expression:
    """Return two expressions in brackets that an operator joins, with their value and numbers."""
    (left, a, used), sign, (right, b, also) = parts
    is_undefined = a is None or b is None or (sign == '/' and b == 0)
    value = None if is_undefined else OPERATORS[sign](a, b)
    return f'({left} {sign} {right})', value, used + also


NUMBER = st.integers(0, 30).map(lambda number: (str(number), Fraction(number), [number]))
EXPRESSION = st.recursive(
    NUMBER, lambda inner: st.tuples(inner, st.sampled_from('+-*/'), inner).map(joined), max_leaves=6
)
WORDS = st.lists(
    st.sampled_from(['The', 'a', 'red', 'Red,', 'car', 'car.', 'an', 'big', '"sea"', 'to-day']), max_size=8
)


@given(EXPRESSION, st.integers(-1, 1), st.sampled_from([[], [7]]))
def test_countdown_is_arithmetic_over_fractions(expression: Expression, off: int, others: list[int]) -> None:
    """An answer scores 1 exactly if its value is the target and it uses exactly the given numbers, in any order."""
    text, value, used = expression
    target = off if value is None or value.denominator != 1 else int(value) + off
    given_numbers = sorted([*used, *others])
    expected = float(value is not None and value == target and not others)
    row = {'messages': [{'role': 'assistant', 'content': f'<answer>{text}</answer>'}]}
    game = {'target': target, 'nums': given_numbers}
    assert CountDownAccuracy()([{**row, 'user_data': game}]) == [expected]


def squad_words(text: str) -> list[str]:
    """Return the words of a text, normalized as in SQuAD's evaluation script."""
    text = ''.join(character for character in text.lower() if character not in set(string.punctuation))
    return re.sub(r'\b(a|an|the)\b', ' ', text).split()


def squad_f1(answer: str, truth: str) -> float:
    """Return the F1 score; each word of the answer is removed from the words of the truth."""
    answer_words, truth_words = squad_words(answer), squad_words(truth)
    if not answer_words or not truth_words:
        return float(answer_words == truth_words)
    truth_count, shared = len(truth_words), 0
    for word in answer_words:
        if word in truth_words:
            truth_words.remove(word)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = shared / len(answer_words), shared / truth_count
    return 2 * precision * recall / (precision + recall)


@given(WORDS, st.lists(WORDS, min_size=1, max_size=3))
def test_f1_is_the_best_overlap_of_words(words: list[str], truths: list[list[str]]) -> None:
    """The F1 reward equals the best SQuAD score over all truths."""
    texts = [' '.join(truth) for truth in truths]
    row: dict[str, Any] = {'messages': [{'role': 'assistant', 'content': f'<answer>{" ".join(words)}</answer>'}]}
    assert F1Reward()([row], [texts]) == [pytest.approx(max(squad_f1(' '.join(words), text) for text in texts))]


@given(st.integers(0, 400), st.integers(1, 200), st.data())
def test_length_reward_equals_that_of_dapo(length: int, longest: int, data: st.DataObject) -> None:
    """The length reward equals the three cases of equation 13 in arXiv 2503.14476."""
    cache = data.draw(st.integers(1, longest))
    if length <= longest - cache:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - cache) - length) / cache
    else:
        expected = -1.0
    row: dict[str, Any] = {'messages': [{'role': 'assistant', 'content': ''}]}
    assert LengthReward(longest, cache)([row], completion_lengths=[length]) == [pytest.approx(expected)]
