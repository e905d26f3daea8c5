r"""Problems of mathematics and physics olympiads, as OlympiadBench has them: answers in `\boxed{...}`.

He et al. 2024 (arXiv 2402.14008). How the parts of a score are weighted is this library's own choice.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from twinkle.data_format import boxed_answers, user_data_get
from twinkle.reward.base import AnswerReward, TextReward, read_truths
from twinkle.reward.errors import InvalidRewardInput
from twinkle.reward.number import read_number
from twinkle.reward.reading import after_thinking, completion_of

_FRACTION = re.compile(r'\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}')
_DRESS = re.compile(
    r'\\left|\\right|\\[,;!: ]|\\q?quad|\\(?:text|mathrm|mathbf|mathit|operatorname)\b|\\[$%]|[\s${}]|\^\\circ|°'
)
"""What changes how an answer looks and not what it is."""
_FULL_WIDTH = {**{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}, 0x3002: '.', 0x200B: None}
"""Characters of Chinese typesetting, and what they are in ASCII."""
_FALLING = 5.0
"""How fast the part of a near miss falls: at a relative error of 20 % it is 1/e."""


class OlympiadBenchAccuracyReward(AnswerReward):
    r"""How right the boxed answers are, from 0 to 1.

    With one answer: 1 where the last boxed one is the ground truth, as text without its dress or as a number within
    the tolerance; for another number `near_miss * exp(-5 relative error)`, so that coming near pays a little. With
    several (`is_multiple_answer` in `user_data`): the share of them that was found, of as many as were given, if those
    were more.

    Args:
        ground_truth_key: of `user_data`, where the answers are, with commas between several.
        near_miss: reward of a number that is all but right, from 0 to 1.
        tolerance: relative error of a right number; the `error` of `user_data`, an absolute one, comes before it, and
            the `unit` there may follow a number.
    """

    def __init__(
        self, ground_truth_key: str = 'ground_truth', *, near_miss: float = 0.5, tolerance: float = 1e-8
    ) -> None:
        super().__init__(ground_truth_key)
        if not 0 <= near_miss <= 1:
            raise InvalidRewardInput('near_miss', f'must be from 0 to 1, got {near_miss}')
        if not 0 <= tolerance < 1:
            raise InvalidRewardInput('tolerance', f'must be from 0 to below 1, got {tolerance}')
        self.near_miss, self.tolerance = near_miss, tolerance

    def __call__(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        ground_truths: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Return the score of each completion."""
        truths = read_truths(self.ground_truth_key, trajectories, ground_truths)
        completions = [completion_of(trajectory, index) for index, trajectory in enumerate(trajectories)]
        scores: list[float] = []
        for trajectory, completion, truth in zip(trajectories, completions, truths, strict=True):
            if str(user_data_get(trajectory, 'is_multiple_answer')).lower() == 'true':
                scores.append(self._share(completion, str(truth)))
            else:
                error, unit = _error_of(trajectory), str(user_data_get(trajectory, 'unit') or '')
                scores.append(self.score(completion, truth, error=error, unit=unit))
        return scores

    def score(self, completion: str, ground_truth: Any, *, error: float | None = None, unit: str = '') -> float:
        """Return the score of one answer; `error` is the absolute one it may have, `unit` what it may end in."""
        answers = boxed_answers(after_thinking(completion))
        if not answers:
            return 0.0
        ending = undressed(unit)
        answer, truth = (undressed(text).removesuffix(ending) for text in (answers[-1], str(ground_truth)))
        if answer == truth:
            return 1.0
        number, expected = read_number(answer), read_number(truth)
        if number is None or expected is None:
            return 0.0
        distance = abs(number - expected)
        if distance <= (error if error is not None else self.tolerance * abs(expected)):
            return 1.0
        return self.near_miss * math.exp(-_FALLING * float(min(distance / abs(expected), 100))) if expected else 0.0

    def _share(self, completion: str, truth: str) -> float:
        expected = [undressed(part) for part in split_answers(truth)]
        boxes = boxed_answers(after_thinking(completion))
        given = list(dict.fromkeys(undressed(part) for box in boxes for part in split_answers(box)))
        left = list(given)
        for part in expected:
            found = next((answer for answer in left if self._is_equal(answer, part)), None)
            if found is not None:
                left.remove(found)
        return (len(given) - len(left)) / max(len(expected), len(given), 1)

    def _is_equal(self, answer: str, truth: str) -> bool:
        number, expected = read_number(answer), read_number(truth)
        if number is None or expected is None:
            return answer == truth
        return abs(number - expected) <= self.tolerance * abs(expected)


class OlympiadBenchFormatReward(TextReward):
    r"""How clearly the answer is given, from 0 to 1.

    Of what is said behind the thinking: 0.4 for a `\boxed{...}`, 0.3 where the last begins within the last 200
    characters, 0.3 where all say the same; 0.3 less where they say three things or more.
    """

    def score(self, completion: str) -> float:
        """Return the score of one completion."""
        said = after_thinking(completion)
        answers = boxed_answers(said)
        if not answers:
            return 0.0
        is_near_end = '\\boxed' in said[-200:]
        count = len({undressed(answer) for answer in answers})
        agreement = 0.3 if count == 1 else -0.3 if count > 2 else 0.0
        return max(0.0, 0.4 + 0.3 * is_near_end + agreement)


class OlympiadBenchQualityReward(TextReward):
    """How much a completion looks like a derivation, from 0 to 1; it says nothing of whether the derivation is right.

    0.4 for steps (equations, operators, words that connect, a conclusion that leads to the answer, a quarter each), 0.3
    for a length between 300 and 1,500 characters, falling on both sides, 0.3 for the share of four-word sequences that
    are not repeated.
    """

    _SIGNS: ClassVar = (
        (re.compile(r'(?<![=!<>])=(?!=)'), 3),
        (re.compile(r'[+\-*/^]|\\frac|\\sqrt'), 5),
        (
            re.compile(
                r'\b(?:step|first|then|finally|therefore|hence|thus)\b|首先|其次|然后|因此|所以|第.步', re.IGNORECASE
            ),
            1,
        ),
        (re.compile(r'(?:thus|therefore|hence|so|answer|因此|所以|答案)[^\n]{0,100}\\boxed', re.IGNORECASE), 1),
    )
    """What is looked for, and how often it has to be there."""

    def score(self, completion: str) -> float:
        """Return the score of one completion."""
        signs = sum(len(pattern.findall(completion)) >= count for pattern, count in self._SIGNS)
        return 0.4 * signs / len(self._SIGNS) + 0.3 * _length_part(len(completion)) + 0.3 * _variety(completion)


def undressed(answer: str) -> str:
    """Return an answer without what changes only its looks; simple fractions become a/b."""
    plain = _FRACTION.sub(r'\1/\2', answer.translate(_FULL_WIDTH))
    return _DRESS.sub('', plain).strip('.,')


def split_answers(text: str) -> list[str]:
    """Return the parts of `text` between commas that stand outside of brackets."""
    parts, depth = [''], 0
    for character in text.translate(_FULL_WIDTH):
        depth += (character in '([{') - (character in ')]}')
        if character == ',' and depth == 0:
            parts.append('')
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _error_of(trajectory: Mapping[str, Any]) -> float | None:
    """Return the absolute error that the problem allows; None where it names none for a single answer."""
    try:
        error = float(user_data_get(trajectory, 'error', ''))
    except (TypeError, ValueError):
        return None
    return error if math.isfinite(error) and error >= 0 else None


def _length_part(length: int) -> float:
    """Return 1 within the range that derivations have, less outside."""
    return min(1.0, length / 300, max(0.25, 1500 / max(length, 1)))


def _variety(completion: str) -> float:
    words = completion.split()
    runs = [tuple(words[start : start + 4]) for start in range(len(words) - 3)]
    return len(set(runs)) / len(runs) if runs else float(bool(words))
