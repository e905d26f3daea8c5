"""Value loss of Proximal Policy Optimization."""

import torch

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.options import check_number, check_whole
from twinkle.loss.reporting import as_numbers, mean_of


class PPOValueLoss(Loss):
    """`1/2 max((v - returns)^2, (old + clip(v - old, -epsilon, epsilon) - returns)^2)`.

    Squared error of PPO, arXiv 1707.06347, equation 9. As in the original implementation (arXiv 2005.12729, section 3),
    the value is clipped around the value at sampling time. v is the value head's output at the row that predicts the
    label, and old is its value when the label was sampled.

    The streams are `returns` and `old_values`.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels. The metrics are means over the labels:
    `value` and `return`, in units of reward; `value_error`, `(v - returns)^2`; and `clip_fraction`, the fraction of
    labels whose error is the error of the clipped value.

    Args:
        epsilon: maximum distance of v from `old_values` before it is clipped, in units of reward; above 0.
        ignore_index: label value to ignore, in addition to -100.

    Raises:
        ValueError: an option is out of range.
    """

    required_streams = ('returns', 'old_values')
    required_outputs = ('values',)

    def __init__(self, epsilon: float = 0.2, ignore_index: int = IGNORE_INDEX) -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)
        self.epsilon = check_number('epsilon', epsilon, low=0.0, is_low_allowed=False)

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the weighted sum."""
        values_R, returns_R, old_R = batch.output('values'), batch.stream('returns'), batch.stream('old_values')
        clipped_R = old_R + (values_R - old_R).clamp(-self.epsilon, self.epsilon)
        error_R, clipped_error_R = (values_R - returns_R).square(), (clipped_R - returns_R).square()
        loss = 0.5 * (batch.weights_R * torch.maximum(error_R, clipped_error_R)).sum()
        reported = {
            'value': mean_of(values_R),
            'return': mean_of(returns_R),
            'value_error': mean_of(error_R),
            'clip_fraction': mean_of(clipped_error_R > error_R),
        }
        return LossOutput(
            loss=loss,
            num_tokens=batch.label_count,
            metrics=as_numbers(reported),
            metric_weight=float(batch.label_count),
        )
