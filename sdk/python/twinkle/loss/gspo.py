"""Group Sequence Policy Optimization."""

from typing import Unpack

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.policy import ClippedPolicyLoss, log_ratio

EPSILON_LOW, EPSILON_HIGH = 3e-4, 4e-4
"""Default distances of the bounds from 1: arXiv 2507.18071, section 5.1."""


class GSPOLoss(ClippedPolicyLoss):
    """Clipped objective with one ratio per sequence.

    The ratio is the geometric mean of the labels' ratios (arXiv 2507.18071, equation 7). Each label uses the value of
    this ratio with the gradient of the label's log-probability (GSPO-token, equations 13 and 14). If the advantages of
    each sequence are equal, this is GSPO (equation 5).

    The divisor of the loss (`LossOutput.num_tokens`) is the number of sequences. For streams and metrics see
    `PolicyLoss`; `ratio` and the metrics derived from it use the ratio of the sequence.

    Args:
        epsilon: see `ClippedPolicyLoss`. 3e-4 if unset (section 5.1 of the paper), because sequence ratios are close
            to 1.
        epsilon_high: see `ClippedPolicyLoss`. If both bounds are unset, 4e-4 (section 5.1 of the paper).
        beta: see `PolicyLoss`.
        entropy_coef: see `PolicyLoss`.
        ignore_index: label value to ignore, in addition to -100.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: an option is unknown or invalid.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        **correction: Unpack[CorrectionOptions],
    ) -> None:
        if epsilon is None:
            epsilon, epsilon_high = EPSILON_LOW, EPSILON_HIGH if epsilon_high is None else epsilon_high
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, ignore_index, **correction)

    def log_ratio(self, batch: LossBatch) -> Tensor:
        """Return [R], the sequence's mean log ratio at each of its labels."""
        return sequence_log_ratio(batch, log_ratio(batch))


def sequence_log_ratio(batch: LossBatch, log_ratio_R: Tensor) -> Tensor:
    """Return [R], each sequence's mean of `log_ratio_R`, with the gradient of the label's log-probability."""
    mean_R = batch.spread(batch.feature_mean(log_ratio_R.detach()))
    return mean_R + batch.logps_R - batch.logps_R.detach()
