"""What the losses of the Tinker API share."""

from abc import abstractmethod

import torch
from torch import Tensor

from twinkle.data_format import LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.options import check_number
from twinkle.loss.reporting import as_numbers


class TinkerLoss(Loss):
    """A sum over labels of `weight * f(label)`; `num_tokens` is 0, `loss:sum` is reported."""

    @abstractmethod
    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R]: the loss of each label."""

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the sum."""
        loss = (batch.weights_R * self.per_label(batch)).sum()
        return LossOutput(loss=loss, num_tokens=0, metrics=as_numbers({'loss:sum': loss}))


class TinkerPolicyLoss(TinkerLoss):
    """One of `logprobs` and `advantages`: r is `exp(log p - old_logps)`, A the advantage."""

    required_streams = ('advantages', 'old_logps')

    def log_ratio(self, batch: LossBatch) -> Tensor:
        """Return [R]: log r."""
        return batch.logps_R - batch.stream('old_logps')


class TinkerClippedLoss(TinkerPolicyLoss):
    """A policy loss with bounds on the ratio, from the options or, label by label, from streams of their names.

    Args:
        clip_low_threshold: the smallest ratio, at least 0.
        clip_high_threshold: the largest, at least the smallest.

    Raises:
        ValueError: a bound is out of its range.
    """

    optional_streams = ('clip_low_threshold', 'clip_high_threshold')

    def __init__(self, clip_low_threshold: float, clip_high_threshold: float) -> None:
        self.clip_low_threshold = check_number('clip_low_threshold', clip_low_threshold, low=0.0)
        self.clip_high_threshold = check_number('clip_high_threshold', clip_high_threshold, low=clip_low_threshold)

    def clipped(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R]: the ratio within its bounds."""
        low = batch.streams.get('clip_low_threshold', ratio_R.new_tensor(self.clip_low_threshold))
        high = batch.streams.get('clip_high_threshold', ratio_R.new_tensor(self.clip_high_threshold))
        return torch.minimum(torch.maximum(ratio_R, low), high)

    def pessimistic(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R]: `- min(r A, clip(r) A)`."""
        advantages_R = batch.stream('advantages')
        return -torch.minimum(ratio_R * advantages_R, self.clipped(ratio_R, batch) * advantages_R)
