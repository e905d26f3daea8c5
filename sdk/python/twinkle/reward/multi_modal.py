"""The reward for questions about images and other media, answered by a choice, a word or a formula."""

import re
from typing import Any

from twinkle.reward.base import AnswerReward
from twinkle.reward.math_reward import MathReward, marked_answer
from twinkle.reward.reading import after_thinking

_CHOICE = re.compile(r'\(?([A-Z])(?:[).:]|\s*$)', re.IGNORECASE)
_MAX_CHARS = 200
"""Number of characters of an answer that are compared as text."""


class MultiModalAccuracyReward(AnswerReward):
    r"""1 if the answer matches the ground truth, else 0.

    The answer is the content of the last `\boxed{...}`, else of `<answer>`, else the text after the thinking. It
    matches if the first 200 characters of both texts are equal except for case, whitespace and a final period, if both
    name the same choice (`B`, `(B)`, `B. A red car`), or if both are mathematically equal. Two different choices never
    match.

    Args:
        ground_truth_key: key of the ground truth in `user_data`.
        seconds: time limit of a mathematical comparison.

    Raises:
        MissingLibrary: math-verify is not installed; the extra `rewards` installs it.
        InvalidRewardInput: `seconds` is not above 0.
    """

    def __init__(self, ground_truth_key: str = 'ground_truth', *, seconds: float = 5.0) -> None:
        super().__init__(ground_truth_key)
        self._math = MathReward(ground_truth_key, seconds=seconds)

    def score(self, completion: str, ground_truth: Any) -> float:
        """Return 1.0 if the answer is right, else 0.0."""
        truth = str(ground_truth)
        expected = marked_answer(truth) or truth
        answer = marked_answer(completion)
        text = after_thinking(completion) if answer is None else answer
        if _normalized(text) == _normalized(expected):
            return 1.0
        choices = _CHOICE.match(text.strip()), _CHOICE.match(expected.strip())
        if choices[0] and choices[1]:
            return float(choices[0][1].upper() == choices[1][1].upper())
        return self._math.score(completion, expected)


def _normalized(text: str) -> str:
    return ' '.join(text[:_MAX_CHARS].casefold().split()).removesuffix('.')
