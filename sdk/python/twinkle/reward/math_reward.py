"""The reward for mathematical answers that are equal to the ground truth."""

from typing import Any, cast

from twinkle.data_format import boxed_answers
from twinkle.reward.base import AnswerReward
from twinkle.reward.math_judge import MathJudge
from twinkle.reward.number import read_number
from twinkle.reward.reading import after_thinking, tagged

_TAIL = 1000
"""Number of characters at the end of a completion that are searched for an answer if no answer is marked."""


class MathReward(AnswerReward):
    r"""1 if the answer is mathematically equal to the ground truth, else 0.

    The answer is the last `\boxed{...}` after the thinking, else the content of `<answer>`, else the expression that
    math-verify finds at the end of the text. `\frac{1}{2}`, `0.5` and `1/2` are equal, and so are sets in different
    order. With several ground truths, one match is enough.

    Args:
        ground_truth_key: key of the ground truth in `user_data`: an answer, or a solution with a marked answer.
        seconds: time limit of one comparison; an answer that takes longer is wrong.

    Raises:
        MissingLibrary: math-verify is not installed; the extra `rewards` installs it.
        InvalidRewardInput: `seconds` is not above 0.
    """

    def __init__(self, ground_truth_key: str = 'ground_truth', *, seconds: float = 5.0) -> None:
        super().__init__(ground_truth_key)
        self._judge = MathJudge(seconds)

    def score(self, completion: str, ground_truth: Any) -> float:
        """Return 1.0 if the answer is right, else 0.0."""
        answer = marked_answer(completion)
        several = isinstance(ground_truth, list | tuple)
        truths = cast('list[Any]', ground_truth) if several else [ground_truth]
        return float(any(self._is_right(answer, completion, str(truth)) for truth in truths))

    def _is_right(self, answer: str | None, completion: str, truth: str) -> bool:
        expected = marked_answer(truth) or truth.strip()
        if answer is None:
            tail = after_thinking(completion)[-_TAIL:].strip()
            return bool(tail) and self._judge.is_same(_as_formula(expected), tail)
        if answer == expected:
            return True
        numbers = read_number(answer), read_number(expected)
        if None not in numbers:
            return numbers[0] == numbers[1]
        return bool(answer) and self._judge.is_same(_as_formula(expected), _as_formula(answer))


def marked_answer(text: str) -> str | None:
    r"""Return the last `\boxed{...}` after the thinking, else the content of `<answer>`, else None."""
    visible = after_thinking(text)
    answers = boxed_answers(visible)
    if answers:
        return answers[-1]
    enclosed = tagged(visible, 'answer')
    inner = boxed_answers(enclosed) if enclosed is not None else []
    return inner[-1] if inner else enclosed


def _as_formula(answer: str) -> str:
    """Mark an answer as a formula, so that math-verify does not parse it as text that contains numbers."""
    return answer if '$' in answer else f'\\boxed{{{answer}}}'
