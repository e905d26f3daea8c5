"""Whether a run learned: what its last steps show against its first, and how much of that is noise."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance

MOST_COMPARED = 5
"""Steps at each end that are compared, at most."""
LEAST_STEPS = 9
"""Of a curve that can be judged: three at each end."""
SURENESS = 2.0
"""Standard errors of the difference that the change has to exceed."""


@dataclass(frozen=True)
class Verdict:
    """The two ends of a curve."""

    compared: int
    """Steps at each end."""
    first: float
    """Mean of the first ones."""
    last: float
    """Mean of the last ones."""
    standard_error: float
    """Of the difference of the two, as of means of independent samples with variances of their own."""
    has_learned: bool
    """Whether the change is in the right direction and beyond noise."""


def judge(curve: Sequence[float], *, is_rising: bool) -> Verdict:
    """Compare the last steps of a curve with its first.

    The trend within either end counts as noise, so a curve that still moves there is judged more strictly.

    Args:
        curve: the metric of each step, in order.
        is_rising: whether more is better.

    Raises:
        ValueError: there are fewer than `LEAST_STEPS`, too few to tell noise from learning.
    """
    if len(curve) < LEAST_STEPS:
        raise ValueError(f'{len(curve)} steps tell nothing; at least {LEAST_STEPS} are needed')
    compared = min(MOST_COMPARED, len(curve) // 3)
    head, tail = curve[:compared], curve[-compared:]
    first, last = fmean(head), fmean(tail)
    standard_error = math.sqrt((variance(head) + variance(tail)) / compared)
    gain = last - first if is_rising else first - last
    return Verdict(compared, first, last, standard_error, has_learned=gain > SURENESS * standard_error)


def read_curve(metrics: Path, metric: str) -> list[float]:
    """Return a metric of all steps that report it, from a recipe's `metrics.jsonl`; nothing where there is none."""
    if not metrics.is_file():
        return []
    rows = (json.loads(line) for line in metrics.read_text(encoding='utf-8').splitlines())
    return [float(row[metric]) for row in rows if metric in row]
