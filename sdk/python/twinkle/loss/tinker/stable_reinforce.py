"""The `stable_reinforce` loss of the Tinker API: a policy gradient with truncated importance weights.

Tinker does not publish its objective; this module defines one.
"""

import torch
from torch import Tensor

from twinkle.loss.base import LossBatch
from twinkle.loss.options import check_number
from twinkle.loss.tinker.base import TinkerLoss

RATIO_LIMIT = 2.0
"""Maximum importance weight, the usual value of truncated importance sampling (Yao et al. 2025)."""


class TinkerStableReinforce(TinkerLoss):
    """`- sum of w (sg(min(r, 2)) A log p - kl_coeff / 2 (log r)^2)`: REINFORCE with truncated importance weights.

    w is the weight of a label, A its advantage, and r is `exp(log p - old_logps)`; without the stream `old_logps`, the
    batch is treated as on policy, with r = 1. `sg` stops the gradient. The bound of 2 limits the effect of labels with
    large ratios, and labels with small ratios have little effect. The penalty estimates the divergence from the
    sampling policy; its gradient is 0 where both policies agree. An old log-probability of 0 marks a label that was not
    sampled: it has importance weight 1 and no penalty.

    Args:
        kl_coeff: factor of the penalty, at least 0.

    Raises:
        ValueError: kl_coeff is out of range.
    """

    required_streams = ('advantages',)
    optional_streams = ('old_logps',)

    def __init__(self, kl_coeff: float = 0.0) -> None:
        self.kl_coeff = check_number('kl_coeff', kl_coeff, low=0.0)

    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R], the negated objective."""
        logps_R, old_R = batch.logps_R, batch.streams.get('old_logps')
        gain_R = batch.stream('advantages') * logps_R
        if old_R is None:
            return -gain_R
        log_ratio_R = torch.where(old_R == 0, 0.0, logps_R - old_R)
        weight_R = log_ratio_R.detach().exp().clamp(max=RATIO_LIMIT)
        return 0.5 * self.kl_coeff * log_ratio_R.square() - weight_R * gain_R
