"""GRPO without its length bias."""

from typing import Unpack

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_whole
from twinkle.loss.policy import ClippedPolicyLoss

_LONGEST = 1 << 31
"""Maximum of `max_completion_length`, longer than the context of any model. Much larger divisors overflow."""


class DRGRPOLoss(ClippedPolicyLoss):
    """Clipped objective, summed over labels and divided by a constant per sequence.

    "GRPO done right", arXiv 2503.20783, section 3.2: dividing by each sequence's length penalizes long wrong answers
    less than short wrong answers. The paper also does not divide advantages by the group's standard deviation; use
    `scale='none'` of `GRPOAdvantage` for that.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of sequences times `max_completion_length`. For
    streams and metrics see `PolicyLoss`.

    Args:
        epsilon: see `ClippedPolicyLoss`.
        epsilon_high: see `ClippedPolicyLoss`.
        beta: see `PolicyLoss`.
        entropy_coef: see `PolicyLoss`.
        max_completion_length: the constant, in tokens: the maximum length that sampling allows; from 1 to 2^31.
        ignore_index: label value to ignore, in addition to -100.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: an option is unknown or invalid.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        max_completion_length: int = 1024,
        ignore_index: int = IGNORE_INDEX,
        **correction: Unpack[CorrectionOptions],
    ) -> None:
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, ignore_index, **correction)
        self.max_completion_length = check_whole('max_completion_length', max_completion_length, low=1, high=_LONGEST)

    def aggregate(self, batch: LossBatch, loss_R: Tensor) -> tuple[Tensor, int]:
        """Return the sum over labels, and the constant divisor times the number of sequences."""
        return loss_R.sum(), batch.sequence_count * self.max_completion_length
