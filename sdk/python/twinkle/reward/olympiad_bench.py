r"""Rewards for the olympiad problems of OlympiadBench, with answers in `\boxed{...}`.

The data format is from He et al. 2024 (arXiv 2402.14008). The weights within the scores are defined here.
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
_FORMATTING = re.compile(
    r'\\left|\\right|\\[,;!: ]|\\q?quad|\\(?:text|mathrm|mathbf|mathit|operatorname)\b|\\[$%]|[\s${}]|\^\\circ|°'
)
"""LaTeX markup and characters that affect only the appearance of an answer."""
_FULL_WIDTH = {**{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}, 0x3002: '.', 0x200B: None}
"""Translation of full-width characters to ASCII."""
_DECAY = 5.0
"""Decay rate of the score of a near miss: at a relative error of 20 %, the score is multiplied by 1/e."""


class OlympiadBenchAccuracyReward(AnswerReward):
    r"""Correctness of the boxed answers, from 0 to 1.

    With one expected answer, the score is 1 if the last boxed answer is equal, as text without formatting or as a
    number within the tolerance. Another number scores `near_miss * exp(-5 * relative error)`, or 0 if the expected
    answer is 0 or not a number. Other text scores 0. With several expected answers (`is_multiple_answer` in
    `user_data`), the score is the number of correct answers divided by the number of expected or of given answers,
    whichever is larger.

    Args:
        ground_truth_key: key of the answers in `user_data`; several answers are separated by commas.
        near_miss: score of a number with an error just above the tolerance, from 0 to 1.
        tolerance: maximum relative error of a correct number. For problems with one answer, an absolute `error` in
            `user_data` takes precedence, and the answer may end in the `unit` in `user_data`.

    Raises:
        InvalidRewardInput: `near_miss` or `tolerance` is out of range.
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
                scores.append(self._fraction_found(completion, str(truth)))
            else:
                error, unit = _error_of(trajectory), str(user_data_get(trajectory, 'unit') or '')
                scores.append(self.score(completion, truth, error=error, unit=unit))
        return scores

    def score(self, completion: str, ground_truth: Any, *, error: float | None = None, unit: str = '') -> float:
        """Return the score of one answer.

        Args:
            completion: text with the boxed answer.
            ground_truth: expected answer.
            error: maximum absolute error. None: the relative tolerance applies.
            unit: unit that may follow the number.
        """
        answers = boxed_answers(after_thinking(completion))
        if not answers:
            return 0.0
        ending = normalized(unit)
        answer, truth = (normalized(text).removesuffix(ending) for text in (answers[-1], str(ground_truth)))
        if answer == truth:
            return 1.0
        number, expected = read_number(answer), read_number(truth)
        if number is None or expected is None:
            return 0.0
        distance = abs(number - expected)
        if distance <= (error if error is not None else self.tolerance * abs(expected)):
            return 1.0
        return self.near_miss * math.exp(-_DECAY * float(min(distance / abs(expected), 100))) if expected else 0.0

    def _fraction_found(self, completion: str, truth: str) -> float:
        expected = [normalized(part) for part in split_answers(truth)]
        boxes = boxed_answers(after_thinking(completion))
        given = list(dict.fromkeys(normalized(part) for box in boxes for part in split_answers(box)))
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
    r"""Clarity of the answer, from 0 to 1.

    A `\boxed{...}` in the text after the thinking scores 0.4, plus 0.3 if the last box starts within the last 200
    characters. To this score, 0.3 is added if all boxed answers are equal; 0.3 is subtracted if there are three or more
    different answers.
    """

    def score(self, completion: str) -> float:
        """Return the score of one completion."""
        text = after_thinking(completion)
        answers = boxed_answers(text)
        if not answers:
            return 0.0
        is_near_end = '\\boxed' in text[-200:]
        count = len({normalized(answer) for answer in answers})
        agreement = 0.3 if count == 1 else -0.3 if count > 2 else 0.0
        return max(0.0, 0.4 + 0.3 * is_near_end + agreement)


class OlympiadBenchQualityReward(TextReward):
    """Similarity of a completion to a derivation, from 0 to 1, regardless of its correctness.

    Steps contribute up to 0.4: a quarter each for equations, operators, connecting words, and a conclusion with the
    answer. A length from 300 to 1,500 characters contributes 0.3, and other lengths contribute less. The fraction of
    distinct four-word sequences contributes up to 0.3.
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
    """Patterns that indicate a derivation, with the number of matches that each needs."""

    def score(self, completion: str) -> float:
        """Return the score of one completion."""
        signs = sum(len(pattern.findall(completion)) >= count for pattern, count in self._SIGNS)
        return 0.4 * signs / len(self._SIGNS) + 0.3 * _length_part(len(completion)) + 0.3 * _variety(completion)


def normalized(answer: str) -> str:
    """Return an answer without formatting; simple fractions become a/b."""
    plain = _FRACTION.sub(r'\1/\2', answer.translate(_FULL_WIDTH))
    return _FORMATTING.sub('', plain).strip('.,')


def split_answers(text: str) -> list[str]:
    """Split `text` at commas outside brackets."""
    parts, depth = [''], 0
    for character in text.translate(_FULL_WIDTH):
        depth += (character in '([{') - (character in ')]}')
        if character == ',' and depth == 0:
            parts.append('')
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _error_of(trajectory: Mapping[str, Any]) -> float | None:
    """Return the maximum absolute error that a problem specifies, or None if it is missing or invalid."""
    try:
        error = float(user_data_get(trajectory, 'error', ''))
    except (TypeError, ValueError):
        return None
    return error if math.isfinite(error) and error >= 0 else None


def _length_part(length: int) -> float:
    """Return 1 for lengths from 300 to 1,500 characters, and less for other lengths."""
    return min(1.0, length / 300, max(0.25, 1500 / max(length, 1)))


def _variety(completion: str) -> float:
    words = completion.split()
    runs = [tuple(words[start : start + 4]) for start in range(len(words) - 3)]
    return len(set(runs)) / len(runs) if runs else float(bool(words))
