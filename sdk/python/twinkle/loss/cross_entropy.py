"""Cross-entropy."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch


class CrossEntropyLoss(Loss):
    """`- sum over labels of weight * log p(label)`.

    Args:
        ignore_index: label that does not count.
        reduction: 'mean' divides the gradient at the step by the number of labels accumulated since the
            last one, so that accumulation steps of unequal length weigh by their labels; 'sum' leaves it.

    Raises:
        ValueError: the reduction is neither.
    """

    def __init__(self, ignore_index: int = IGNORE_INDEX, reduction: str = 'mean') -> None:
        if reduction not in ('mean', 'sum'):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        self.ignore_index = ignore_index
        self.reduction = reduction

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the weighted sum."""
        loss = -(batch.weights_R * batch.logps_R).sum()
        return LossOutput(loss=loss, num_tokens=len(batch.labels_R) if self.reduction == 'mean' else 0)
