"""The loss."""

from twinkle.metric.base import ForwardFacts, Metric


class LossMetric(Metric):
    """Reports the mean loss and how many labels it is the mean of.

    `loss`: the sum of losses over the number of labels. `label_count`: that number. Beside them
    what the loss itself reports, averaged over batches.
    """

    def __init__(self) -> None:
        self.reset()

    def accumulate(self, facts: ForwardFacts) -> None:
        """Take in a batch."""
        self._loss_sum += facts.loss_sum
        self._label_count += facts.label_count
        self._batch_count += 1
        for name, value in facts.loss_metrics.items():
            self._reported[name] = self._reported.get(name, 0.0) + value

    def calculate(self) -> dict[str, float]:
        """Return the numbers."""
        if not self._batch_count:
            return {}
        reported = {name: total / self._batch_count for name, total in self._reported.items()}
        loss = self._loss_sum / max(self._label_count, 1)
        return {**reported, 'loss': loss, 'label_count': float(self._label_count)}

    def reset(self) -> None:
        """Begin anew."""
        self._loss_sum, self._label_count, self._batch_count = 0.0, 0, 0
        self._reported: dict[str, float] = {}
