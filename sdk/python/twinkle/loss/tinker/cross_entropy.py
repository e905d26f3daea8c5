"""Tinker's `cross_entropy`."""

from torch import Tensor

from twinkle.loss.base import LossBatch
from twinkle.loss.tinker.base import TinkerLoss


class TinkerCrossEntropy(TinkerLoss):
    """`- sum of weight * log p`; weights may be negative, which `forward_backward_custom` builds on."""

    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R]: the negative log-probability."""
        return -batch.logps_R
