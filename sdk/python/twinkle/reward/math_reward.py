"""Mathematics: whether an answer means what the ground truth does."""

from typing import Any, cast

from twinkle.data_format import boxed_answers
from twinkle.reward.base import AnswerReward
from twinkle.reward.math_judge import MathJudge
from twinkle.reward.number import read_number
from twinkle.reward.reading import after_thinking, tagged

_TAIL = 1000
"""Characters at the end of a completion that marks no answer, in which one is looked for."""


class MathReward(AnswerReward):
    r"""1 where the answer is mathematically the same as the ground truth, else 0.

    The answer is the last `\boxed{...}` behind the thinking, or what `<answer>` encloses, or else what math-verify
    finds at the end of what is said. `\frac{1}{2}`, `0.5` and `1/2` are the same; so are sets in another order. Of
    several ground truths one has to be met.

    Args:
        ground_truth_key: of `user_data`, where the ground truth is: an answer, or a solution that marks one.
        seconds: an answer may take; one that takes longer is wrong.

    Raises:
        MissingLibrary: math-verify is not installed; the extra `rewards` brings it.
    """

    def __init__(self, ground_truth_key: str = 'ground_truth', *, seconds: float = 5.0) -> None:
        super().__init__(ground_truth_key)
        self._judge = MathJudge(seconds)

    def score(self, completion: str, ground_truth: Any) -> float:
        """Return 1.0 where the answer is right."""
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
    r"""Return the last `\boxed{...}` behind the thinking, or what `<answer>` encloses; None where there is neither."""
    said = after_thinking(text)
    answers = boxed_answers(said)
    if answers:
        return answers[-1]
    enclosed = tagged(said, 'answer')
    inner = boxed_answers(enclosed) if enclosed is not None else []
    return inner[-1] if inner else enclosed


def _as_formula(answer: str) -> str:
    """Return an answer as math-verify takes it for one formula rather than for text with numbers in it."""
    return answer if '$' in answer else f'\\boxed{{{answer}}}'
