"""GRPO without its biases in length."""

from typing import Unpack

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_whole
from twinkle.loss.policy import ClippedPolicyLoss

_LONGEST = 1 << 31
"""No model's context comes near; far beyond, what divides the gradient is no number of the machine any more."""


class DRGRPOLoss(ClippedPolicyLoss):
    """The clipped objective, added up over labels and divided by a constant for each sequence.

    "GRPO done right", arXiv 2503.20783, section 3.2: where each sequence's own length divided, long wrong
    answers were punished less than short ones. The paper's advantages are not divided by the group's
    deviation either: that is the caller's, with `scale='none'`.

    `num_tokens`: the sequences times `max_completion_length`.

    Args:
        epsilon: as of `ClippedPolicyLoss`.
        epsilon_high: as of `ClippedPolicyLoss`.
        beta: as of `PolicyLoss`.
        entropy_coef: as of `PolicyLoss`.
        max_completion_length: the constant, in tokens, the longest that sampling allows; from 1 to 2^31.
        ignore_index: label that does not count.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: a number is out of its range.
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
        """Return the sum over labels, and the constant for each sequence."""
        return loss_R.sum(), batch.sequence_count * self.max_completion_length
