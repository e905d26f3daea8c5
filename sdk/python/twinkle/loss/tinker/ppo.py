"""The `ppo` loss of the Tinker API: the clipped objective of Proximal Policy Optimization."""

from torch import Tensor

from twinkle.loss.base import LossBatch
from twinkle.loss.tinker.base import TinkerClippedLoss


class TinkerPPO(TinkerClippedLoss):
    """`- sum of w min(r A, clip(r, low, high) A)`, where w is the weight of a label.

    For arguments see `TinkerClippedLoss`.
    """

    def __init__(self, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> None:
        super().__init__(clip_low_threshold, clip_high_threshold)

    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R], the negated clipped objective."""
        return self.pessimistic(self.log_ratio(batch).exp(), batch)
