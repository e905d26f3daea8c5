"""Tinker's `importance_sampling`."""

from torch import Tensor

from twinkle.loss.base import LossBatch
from twinkle.loss.tinker.base import TinkerPolicyLoss


class TinkerImportanceSampling(TinkerPolicyLoss):
    """`- sum of r A`, where r is the ratio and A the advantage."""

    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R], the negated weighted advantage."""
        return -self.log_ratio(batch).exp() * batch.stream('advantages')
