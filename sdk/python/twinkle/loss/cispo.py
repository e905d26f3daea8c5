"""Clipped Importance Sampling weight Policy Optimization."""

from typing import Unpack

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_number
from twinkle.loss.policy import PolicyLoss


class CISPOLoss(PolicyLoss):
    """`- sg(min(r, 1 + epsilon)) * A * log p`: clips the ratio, but keeps the gradient of every label.

    `sg` stops the gradient; for r and A see `PolicyLoss`. MiniMax-M1, arXiv 2506.13585, equations 4 and 5, without a
    lower bound, as in the paper's experiments.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels. For streams and metrics see `PolicyLoss`;
    `clip_fraction` is the fraction of labels whose ratio was clipped.

    Args:
        epsilon: ratios are clipped at `1 + epsilon`; above 0.
        beta: see `PolicyLoss`.
        entropy_coef: see `PolicyLoss`.
        ignore_index: label value to ignore, in addition to -100.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: an option is unknown or invalid.
    """

    aggregation = 'token-mean'

    def __init__(
        self,
        epsilon: float = 0.2,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        **correction: Unpack[CorrectionOptions],
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, ignore_index=ignore_index, **correction)
        self.epsilon = check_number('epsilon', epsilon, low=0.0, is_low_allowed=False)

    def surrogate(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R], the negated weighted log-probability."""
        weight_R = ratio_R.detach().clamp(max=1.0 + self.epsilon)
        return -weight_R * batch.stream('advantages') * batch.logps_R

    def is_clipped(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return bool [R], true where the ratio exceeds its bound."""
        del batch
        return ratio_R > 1.0 + self.epsilon
