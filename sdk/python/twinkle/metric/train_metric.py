"""How training goes on."""

import time
from collections.abc import Callable

from twinkle.metric.base import ForwardFacts, Metric, StepFacts


class TrainMetric(Metric):
    """Reports rates and the last step.

    `learning_rate` and `step_count` of the last step, `grad_norm` as the mean over steps, and since
    the last report `elapsed_seconds`, `tokens_per_second` and `steps_per_second`.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: StepFacts | None = None
        self.reset()

    def accumulate(self, facts: ForwardFacts) -> None:
        """Take in a batch."""
        self._token_count += facts.token_count

    def accumulate_step(self, facts: StepFacts) -> None:
        """Take in an optimizer step."""
        self._last = facts
        self._steps += 1
        if facts.grad_norm is not None:
            self._grad_norms.append(facts.grad_norm)

    def calculate(self) -> dict[str, float]:
        """Return the numbers."""
        elapsed = self._clock() - self._begin
        values = {'elapsed_seconds': elapsed}
        if elapsed > 0:
            values['tokens_per_second'] = self._token_count / elapsed
            values['steps_per_second'] = self._steps / elapsed
        if self._last is not None:
            values['learning_rate'] = self._last.learning_rate
            values['step_count'] = float(self._last.step_count)
        if self._grad_norms:
            values['grad_norm'] = sum(self._grad_norms) / len(self._grad_norms)
        return values

    def reset(self) -> None:
        """Begin anew; the last step's facts stay."""
        self._begin = self._clock()
        self._token_count, self._steps = 0, 0
        self._grad_norms: list[float] = []
