"""Determines whether a run learned: compares its last steps with its first steps and with the noise."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance

MAX_COMPARED = 5
"""Maximum number of compared steps at each end of a curve."""
MIN_STEPS = 9
"""Minimum number of steps of a curve, so that three steps at each end are compared."""
MIN_STANDARD_ERRORS = 2.0
"""The change of the mean must exceed this number of standard errors."""


@dataclass(frozen=True)
class Verdict:
    """Comparison of the two ends of a curve."""

    compared: int
    """Number of compared steps at each end."""
    first: float
    """Mean of the first steps."""
    last: float
    """Mean of the last steps."""
    standard_error: float
    """Standard error of the difference between the means of two independent samples with unequal variances."""
    has_learned: bool
    """Whether the change is in the right direction and larger than the noise."""


def judge(curve: Sequence[float], *, is_rising: bool) -> Verdict:
    """Compare the last steps of a curve with its first steps.

    A trend within either end counts as noise, so the comparison is stricter if the curve still changes there.

    Args:
        curve: Metric of each step, in order.
        is_rising: Whether larger values are better.

    Raises:
        ValueError: The curve has fewer than `MIN_STEPS` steps.
    """
    if len(curve) < MIN_STEPS:
        raise ValueError(f'the curve has {len(curve)} steps; at least {MIN_STEPS} are needed')
    compared = min(MAX_COMPARED, len(curve) // 3)
    head, tail = curve[:compared], curve[-compared:]
    first, last = fmean(head), fmean(tail)
    standard_error = math.sqrt((variance(head) + variance(tail)) / compared)
    gain = last - first if is_rising else first - last
    return Verdict(compared, first, last, standard_error, has_learned=gain > MIN_STANDARD_ERRORS * standard_error)


def read_curve(metrics: Path, metric: str) -> list[float]:
    """Return the values of a metric in a recipe's `metrics.jsonl`, or an empty list if the file does not exist."""
    if not metrics.is_file():
        return []
    rows = (json.loads(line) for line in metrics.read_text(encoding='utf-8').splitlines())
    return [float(row[metric]) for row in rows if metric in row]
