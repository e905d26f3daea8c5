"""Timing in turns: what is compared runs A, B, A, B, so that what else the machine does falls on all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The seconds that one thing took, over the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    def as_figures(self) -> dict[str, float]:
        """Return median and extremes, rounded."""
        return {
            'median_seconds': round(self.median, 5),
            'least_seconds': round(min(self.seconds), 5),
            'most_seconds': round(max(self.seconds), 5),
        }


def time_in_turns(
    runs: Mapping[str, Callable[[], Any]], *, rounds: int, warmups: int = 1, finish: Callable[[], None] | None = None
) -> dict[str, Spread]:
    """Run each in turn for some rounds and return how long each took.

    Args:
        runs: what to run, by name.
        rounds: how often.
        warmups: rounds before those that count.
        finish: waits for an accelerator, whose work is done later than it is asked for.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(warmups + rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if finish is not None:
                finish()
            if index >= warmups:
                seconds[name].append(time.perf_counter() - begin)
    return {name: Spread(tuple(times)) for name, times in seconds.items()}


def ratio_by_round(above: Spread, below: Spread) -> dict[str, float]:
    """Return the median and the extremes of the ratios of neighbouring turns."""
    ratios = [a / b for a, b in zip(above.seconds, below.seconds, strict=True)]
    return {
        'median': round(statistics.median(ratios), 4),
        'least': round(min(ratios), 4),
        'most': round(max(ratios), 4),
    }
