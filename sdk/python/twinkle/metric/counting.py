"""Base class of metrics whose state is a set of running totals."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.metric.base import Metric, MetricState


class CountingMetric(Metric):
    """Metric with named totals."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        self._totals = {}

    def state(self) -> MetricState:
        return dict(self._totals)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from saved totals.

        Raises:
            ValueError: a total is not a number.
        """
        self._totals = checked_numbers(type(self).__name__, state)

    def add(self, name: str, value: float) -> None:
        """Add a value to a total."""
        self._totals[name] = self._totals.get(name, 0) + value

    def raise_to(self, name: str, value: float) -> None:
        """Set a total to the maximum of its value and `value`; a total that was never set becomes `value`."""
        self._totals[name] = max(self._totals.get(name, -math.inf), value)

    def total(self, name: str) -> float:
        """Return a total, 0 if it was never set."""
        return self._totals.get(name, 0)

    def add_moments(self, name: str, values: npt.NDArray[np.float64]) -> None:
        """Add values to a running mean and variance (Chan, Golub and LeVeque 1979, eq. 2.1).

        The formula avoids cancellation, which would lose precision.
        """
        if not len(values):
            return
        before, count = self.total(f'{name}.count'), len(values)
        mean = float(values.mean())
        delta, total = mean - self.total(f'{name}.mean'), before + count
        self.add(f'{name}.spread', float(np.square(values - mean).sum()) + delta * delta * before * count / total)
        self.add(f'{name}.mean', delta * count / total)
        self.add(f'{name}.count', count)

    def variance(self, name: str, *, is_sample: bool = False) -> float:
        """Return the variance of the values given to `add_moments`; sample variance divides by count - 1."""
        count = self.total(f'{name}.count') - is_sample
        return self.total(f'{name}.spread') / count if count > 0 else 0.0

    def means(self, names: Mapping[str, str], *, by: str) -> dict[str, float]:
        """Return totals divided by the total `by`, under the given report names; empty if the divisor is 0."""
        count = self.total(by)
        return {report_name: float(self.total(name) / count) for report_name, name in names.items()} if count else {}


def checked_numbers(metric: str, state: Mapping[str, Any]) -> dict[str, float]:
    """Return a copy of the numbers.

    Raises:
        ValueError: a value is not a number.
    """
    for name, value in state.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f'{name} in the state of {metric} must be a number, got {value!r}')
    return dict(state)
