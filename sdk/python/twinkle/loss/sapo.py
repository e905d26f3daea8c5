"""Soft Adaptive Policy Optimization."""

from typing import Unpack

import torch
from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_number
from twinkle.loss.policy import PolicyLoss


class SAPOLoss(PolicyLoss):
    """`- 4 / tau * sigmoid(tau (r - 1)) * A`: a soft gate instead of clipping.

    arXiv 2511.20347, equations 5 and 6. On policy, the gradient equals that of the unclipped ratio. It decays as r
    moves away from 1, faster for a larger tau.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of sequences. For streams and metrics see
    `PolicyLoss`.

    Args:
        beta: see `PolicyLoss`.
        entropy_coef: see `PolicyLoss`.
        tau_pos: tau for positive advantages, above 0.
        tau_neg: tau for all other advantages, above 0. The paper finds training more stable if it is slightly
            larger than `tau_pos`.
        ignore_index: label value to ignore, in addition to -100.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: an option is unknown or invalid.
    """

    def __init__(
        self,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        ignore_index: int = IGNORE_INDEX,
        **correction: Unpack[CorrectionOptions],
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, ignore_index=ignore_index, **correction)
        self.tau_pos = check_number('tau_pos', tau_pos, low=0.0, is_low_allowed=False)
        self.tau_neg = check_number('tau_neg', tau_neg, low=0.0, is_low_allowed=False)

    def surrogate(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R], the negated gated advantage."""
        advantages_R = batch.stream('advantages')
        tau_R = torch.where(
            advantages_R > 0,
            advantages_R.new_tensor(self.tau_pos),
            advantages_R.new_tensor(self.tau_neg),
        )
        return -4.0 / tau_R * torch.sigmoid(tau_R * (ratio_R - 1.0)) * advantages_R
