"""Alternating measurements: variants run in the order A, B, A, B, so that other work affects all of them equally."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Durations of one variant over the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median duration in seconds."""
        return statistics.median(self.seconds)

    def as_figures(self) -> dict[str, float]:
        """Return the rounded median, minimum and maximum."""
        return {
            'median_seconds': round(self.median, 5),
            'least_seconds': round(min(self.seconds), 5),
            'most_seconds': round(max(self.seconds), 5),
        }


def time_alternately(
    runs: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmups: int = 1,
    finish: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Spread]:
    """Run the variants alternately and return their durations.

    Args:
        runs: Variants by name.
        rounds: Number of measured rounds.
        warmups: Number of rounds before the measured rounds.
        finish: Function that waits for the accelerator, which computes asynchronously.
        clock: Clock in seconds; `time.process_time` if other work runs on the machine.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(warmups + rounds):
        for name, run in runs.items():
            begin = clock()
            run()
            if finish is not None:
                finish()
            if index >= warmups:
                seconds[name].append(clock() - begin)
    return {name: Spread(tuple(times)) for name, times in seconds.items()}


def ratio_by_round(above: Spread, below: Spread) -> dict[str, float]:
    """Return the median, minimum and maximum over the rounds of the ratio of `above` to `below`."""
    ratios = [a / b for a, b in zip(above.seconds, below.seconds, strict=True)]
    return {
        'median': round(statistics.median(ratios), 4),
        'least': round(min(ratios), 4),
        'most': round(max(ratios), 4),
    }
