"""Mean loss, and the metrics that the loss reports."""

from typing import ClassVar

from twinkle.metric.base import ForwardFacts
from twinkle.metric.counting import CountingMetric

_REPORTED = 'reported.'
"""Prefix of the totals of the metrics that the loss reports."""


class LossMetric(CountingMetric):
    """Reports the mean loss, the number of labels, and the metrics of the loss.

    `loss` is the sum of losses divided by the number of labels, `label_count`. Each metric of the loss is averaged over
    the batches that report it, in the loss's units.
    """

    units: ClassVar = {'loss': 'nats/label', 'label_count': 'labels'}

    def accumulate(self, facts: ForwardFacts) -> None:
        self.add('batches', 1)
        self.add('loss_sum', facts.loss_sum)
        self.add('label_count', facts.label_count)
        for name, value in facts.loss_metrics.items():
            self.add(f'{_REPORTED}sum.{name}', value)
            self.add(f'{_REPORTED}count.{name}', 1)

    def calculate(self) -> dict[str, float]:
        if not self.total('batches'):
            return {}
        values: dict[str, float] = {}
        for key in self.state():
            if key.startswith(f'{_REPORTED}sum.'):
                name = key.removeprefix(f'{_REPORTED}sum.')
                values[name] = self.total(key) / self.total(f'{_REPORTED}count.{name}')
        labels = self.total('label_count')
        return {**values, 'loss': self.total('loss_sum') / max(labels, 1), 'label_count': float(labels)}
