"""The loss."""

from typing import ClassVar

from twinkle.metric.base import ForwardFacts
from twinkle.metric.counting import CountingMetric

_REPORTED = 'reported.'


class LossMetric(CountingMetric):
    """Reports the mean loss and how many labels it is the mean of.

    `loss`: the sum of losses over the number of labels. `label_count`: that number. Beside them what
    the loss itself reports, averaged over the batches that reported it; its unit is the loss's own.
    """

    units: ClassVar = {'loss': 'nats/label', 'label_count': 'labels'}

    def accumulate(self, facts: ForwardFacts) -> None:
        """Take in a batch."""
        self.add('batches', 1)
        self.add('loss_sum', facts.loss_sum)
        self.add('label_count', facts.label_count)
        for name, value in facts.loss_metrics.items():
            self.add(f'{_REPORTED}sum.{name}', value)
            self.add(f'{_REPORTED}count.{name}', 1)

    def calculate(self) -> dict[str, float]:
        """Return the numbers."""
        if not self.total('batches'):
            return {}
        values: dict[str, float] = {}
        for key in self.state():
            if key.startswith(f'{_REPORTED}sum.'):
                name = key.removeprefix(f'{_REPORTED}sum.')
                values[name] = self.total(key) / self.total(f'{_REPORTED}count.{name}')
        labels = self.total('label_count')
        return {**values, 'loss': self.total('loss_sum') / max(labels, 1), 'label_count': float(labels)}
