"""The `cispo` loss of the Tinker API: a policy gradient with clipped importance weights."""

from torch import Tensor

from twinkle.loss.base import LossBatch
from twinkle.loss.tinker.base import TinkerClippedLoss


class TinkerCISPO(TinkerClippedLoss):
    """`- sum of w sg(clip(r, low, high)) A log p`, where w is the weight of a label, and `sg` stops the gradient.

    For arguments see `TinkerClippedLoss`.
    """

    def __init__(self, clip_low_threshold: float = 0.0, clip_high_threshold: float = 4.0) -> None:
        super().__init__(clip_low_threshold, clip_high_threshold)

    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R], the negated weighted log-probability."""
        ratio_R = self.clipped(self.log_ratio(batch).detach().exp(), batch)
        return -ratio_R * batch.logps_R * batch.stream('advantages')
