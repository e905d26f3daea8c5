"""Base classes of the Tinker API's losses."""

from abc import abstractmethod

import torch
from torch import Tensor

from twinkle.data_format import LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.options import check_number
from twinkle.loss.reporting import as_numbers


class TinkerLoss(Loss):
    """Sum over labels of `weight * f(label)`, with the metric `loss:sum`.

    The gradient is not divided (`LossOutput.num_tokens` is 0). The log-probabilities of labels of weight 0 are computed
    too. The loss of a batch with only such labels is 0.
    """

    takes_every_label = True

    @abstractmethod
    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R], the loss of each label."""

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the sum."""
        loss = (batch.weights_R * self.per_label(batch)).sum()
        return LossOutput(loss=loss, num_tokens=0, metrics=as_numbers({'loss:sum': loss}))


class TinkerPolicyLoss(TinkerLoss):
    """Base class of losses with the ratio r = `exp(log p - old_logps)` and the advantage A."""

    required_streams = ('advantages', 'old_logps')

    def log_ratio(self, batch: LossBatch) -> Tensor:
        """Return [R], the logarithm of the ratio."""
        return batch.logps_R - batch.stream('old_logps')


class TinkerClippedLoss(TinkerPolicyLoss):
    """Policy loss with bounds on the ratio.

    Streams with the names of the options replace the options, label by label.

    Args:
        clip_low_threshold: lower bound, at least 0.
        clip_high_threshold: upper bound, at least the lower bound.

    Raises:
        ValueError: a bound is out of range.
    """

    optional_streams = ('clip_low_threshold', 'clip_high_threshold')

    def __init__(self, clip_low_threshold: float, clip_high_threshold: float) -> None:
        self.clip_low_threshold = check_number('clip_low_threshold', clip_low_threshold, low=0.0)
        self.clip_high_threshold = check_number('clip_high_threshold', clip_high_threshold, low=clip_low_threshold)

    def clipped(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R], the ratio clipped to its bounds."""
        low, high = (self._bound(name, ratio_R, batch) for name in ('clip_low_threshold', 'clip_high_threshold'))
        return torch.minimum(torch.maximum(ratio_R, low), high)

    def pessimistic(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R], `- min(r A, clip(r) A)`."""
        advantages_R = batch.stream('advantages')
        return -torch.minimum(ratio_R * advantages_R, self.clipped(ratio_R, batch) * advantages_R)

    def _bound(self, name: str, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        return batch.stream(name) if name in batch.streams else ratio_R.new_tensor(getattr(self, name))
