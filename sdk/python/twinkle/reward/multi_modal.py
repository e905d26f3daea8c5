"""Questions about images and other media: a choice, a word, or a formula."""

import re
from typing import Any

from twinkle.reward.base import AnswerReward
from twinkle.reward.math_reward import MathReward, marked_answer
from twinkle.reward.reading import after_thinking

_CHOICE = re.compile(r'\(?([A-Z])(?:[).:]|\s*$)', re.IGNORECASE)
_LONGEST_WORDS = 200
"""Characters of an answer that is compared as words."""


class MultiModalAccuracyReward(AnswerReward):
    r"""1 where the answer is the ground truth, else 0.

    The answer is what `<answer>` or the last `\boxed{...}` encloses, or all that is said behind the thinking. It is
    right where it is the same text but for case and a full stop, where both name the same choice (`B`, `(B)`,
    `B. A red car`), or where both mean the same mathematically.

    Args:
        ground_truth_key: of `user_data`, where the ground truth is.
        seconds: a mathematical comparison may take.

    Raises:
        MissingLibrary: math-verify is not installed; the extra `rewards` brings it.
    """

    def __init__(self, ground_truth_key: str = 'ground_truth', *, seconds: float = 5.0) -> None:
        super().__init__(ground_truth_key)
        self._math = MathReward(ground_truth_key, seconds=seconds)

    def score(self, completion: str, ground_truth: Any) -> float:
        """Return 1.0 where the answer is right."""
        truth = str(ground_truth)
        expected = marked_answer(truth) or truth
        answer = marked_answer(completion)
        said = after_thinking(completion) if answer is None else answer
        if _plain(said) == _plain(expected):
            return 1.0
        choices = _CHOICE.match(said.strip()), _CHOICE.match(expected.strip())
        if choices[0] and choices[1]:
            return float(choices[0][1].upper() == choices[1][1].upper())
        return self._math.score(completion, expected)


def _plain(text: str) -> str:
    return ' '.join(text[:_LONGEST_WORDS].casefold().split()).removesuffix('.')
