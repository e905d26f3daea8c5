"""Clipped Importance Sampling weight Policy Optimization."""

from typing import Unpack

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_number
from twinkle.loss.policy import PolicyLoss


class CISPOLoss(PolicyLoss):
    """`- sg(min(r, 1 + epsilon)) * A * log p`: the ratio is clipped, never a label's gradient.

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5, without a lower bound, as the paper trains.

    `num_tokens`: the labels. Streams and reports: see `PolicyLoss`; `clip_fraction` is the share of labels
    whose ratio was bounded.

    Args:
        epsilon: how far above 1 a ratio counts, above 0.
        beta: as of `PolicyLoss`.
        entropy_coef: as of `PolicyLoss`.
        ignore_index: label that does not count.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: a number is out of its range.
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
        """Return [R]: the weighted log-probability, negated."""
        weight_R = ratio_R.detach().clamp(max=1.0 + self.epsilon)
        return -weight_R * batch.stream('advantages') * batch.logps_R

    def is_clipped(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return bool [R]: where the ratio is above its bound."""
        del batch
        return ratio_R > 1.0 + self.epsilon
