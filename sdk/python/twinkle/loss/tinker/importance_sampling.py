"""The `importance_sampling` loss of the Tinker API: the advantage times the ratio of probabilities."""

from torch import Tensor

from twinkle.loss.base import LossBatch
from twinkle.loss.tinker.base import TinkerPolicyLoss


class TinkerImportanceSampling(TinkerPolicyLoss):
    """`- sum of w r A`, where w is the weight of a label, r its ratio and A its advantage."""

    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R], the negated weighted advantage."""
        return -self.log_ratio(batch).exp() * batch.stream('advantages')
