r"""Rewards for grade-school mathematics: a number in `\boxed{...}` or after `####`."""

import re
from typing import Any

from twinkle.data_format import boxed_answers
from twinkle.reward.base import AnswerReward, TextReward
from twinkle.reward.number import read_number
from twinkle.reward.reading import after_thinking

_MARKED = re.compile(r'####[ \t]*([^\n]{1,80})')


class GSM8KAccuracyReward(AnswerReward):
    r"""1 if the completion's number equals the ground truth, else 0.

    The number is the content of the last `\boxed{...}`, else the text after the last `####`. Thinking is ignored.
    Ground truths may be complete solutions that end in `#### <number>`. The formats are from Cobbe et al. 2021 (arXiv
    2110.14168) and from the MATH dataset.
    """

    def score(self, completion: str, ground_truth: Any) -> float:
        """Return 1.0 if both answers are equal as numbers or, if an answer is not a number, as text; else 0.0."""
        truth = str(ground_truth)
        answer, expected = gsm8k_answer(completion), gsm8k_answer(truth) or truth.strip()
        if answer is None:
            return 0.0
        number, expected_number = read_number(answer), read_number(expected)
        if number is None or expected_number is None:
            return float(answer == expected)
        return float(number == expected_number)


class GSM8KFormatReward(TextReward):
    r"""1 if the completion marks its answer with `\boxed{...}` or `####`, else 0."""

    def score(self, completion: str) -> float:
        """Return 1.0 if an answer is marked, else 0.0."""
        return float(bool(gsm8k_answer(completion)))


def gsm8k_answer(completion: str) -> str | None:
    """Return the marked answer after the thinking, or None if there is no marked answer."""
    text = after_thinking(completion)
    answers = boxed_answers(text) or _MARKED.findall(text)
    return answers[-1].strip() if answers else None
