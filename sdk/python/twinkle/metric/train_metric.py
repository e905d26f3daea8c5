"""Throughput and progress of training."""

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from twinkle.metric.base import ForwardFacts, MetricState, StepFacts
from twinkle.metric.counting import CountingMetric, checked_numbers

_LAST = ('learning_rate', 'step_count')
"""Values of the last step, which `reset` keeps."""
_ELAPSED = 'elapsed_seconds'
"""Name of the elapsed time in reports and in the state."""


class TrainMetric(CountingMetric):
    """Reports throughput and the last step.

    It reports `learning_rate` and `step_count` of the last step, `grad_norm` as the mean over steps, and
    `elapsed_seconds`, `tokens_per_second` and `steps_per_second` since the last `reset`. A rate is omitted if there
    were no tokens or no steps. After a restart, the elapsed time continues from the saved state: the downtime does not
    count, and a replayed batch counts with the time of its replay.

    Args:
        clock: function that returns a time in seconds, which never decreases.
    """

    units: ClassVar = {
        _ELAPSED: 's',
        'tokens_per_second': 'tokens/s',
        'steps_per_second': 'steps/s',
        'learning_rate': '1/step',
        'step_count': 'steps',
        'grad_norm': 'loss/weight',
    }
    wall_clock_values: ClassVar = frozenset({_ELAPSED, 'tokens_per_second', 'steps_per_second'})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        super().__init__()

    def accumulate(self, facts: ForwardFacts) -> None:
        self.add('tokens', facts.token_count)

    def accumulate_step(self, facts: StepFacts) -> None:
        self.add('steps', 1)
        self._totals |= {'learning_rate': facts.learning_rate, 'step_count': facts.step_count}
        if facts.grad_norm is not None:
            self.add('grad_norm_sum', facts.grad_norm)
            self.add('grad_norm_count', 1)

    def calculate(self) -> dict[str, float]:
        elapsed = self._clock() - self._begin
        values = {_ELAPSED: elapsed}
        if elapsed > 0:
            counts = {name: self.total(name) for name in ('tokens', 'steps')}
            values |= {f'{name}_per_second': count / elapsed for name, count in counts.items() if count}
        values |= {name: float(self._totals[name]) for name in _LAST if name in self._totals}
        return {**values, **self.means({'grad_norm': 'grad_norm_sum'}, by='grad_norm_count')}

    def reset(self) -> None:
        """Clear the accumulated results, except the results of the last step."""
        self._begin = self._clock()
        self._totals = {name: self._totals[name] for name in _LAST if name in self._totals}

    def state(self) -> MetricState:
        """Return the totals and the elapsed seconds."""
        return {**super().state(), _ELAPSED: self._clock() - self._begin}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from saved totals and the saved elapsed time."""
        totals = checked_numbers(type(self).__name__, state)
        self._begin = self._clock() - totals.pop(_ELAPSED, 0.0)
        self._totals = totals
