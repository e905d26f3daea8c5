"""Squared error of the value head."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.options import check_whole
from twinkle.loss.reporting import as_numbers, mean_of


class MSELoss(Loss):
    """`sum over labels of weight * (v - returns)^2`, for regression and reward models.

    v is the value head's output at the row that predicts the label; a reward model labels only the last token.
    The stream `returns` contains the targets.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels. The metrics `value` and `return` are
    means over the labels, in the targets' unit.

    Args:
        ignore_index: label value to ignore, in addition to -100.

    Raises:
        ValueError: `ignore_index` is not an integer.
    """

    required_streams = ('returns',)
    required_outputs = ('values',)

    def __init__(self, ignore_index: int = IGNORE_INDEX) -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the weighted sum."""
        values_R, returns_R = batch.output('values'), batch.stream('returns')
        return LossOutput(
            loss=(batch.weights_R * (values_R - returns_R).square()).sum(),
            num_tokens=batch.label_count,
            metrics=as_numbers({'value': mean_of(values_R), 'return': mean_of(returns_R)}),
            metric_weight=float(batch.label_count),
        )
