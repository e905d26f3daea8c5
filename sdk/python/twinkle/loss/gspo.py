"""Group Sequence Policy Optimization."""

from typing import Unpack

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.policy import ClippedPolicyLoss, log_ratio


class GSPOLoss(ClippedPolicyLoss):
    """The clipped objective with one ratio for a whole sequence.

    The ratio is the geometric mean of the labels' (arXiv 2507.18071, equation 7). Each label has its
    value and the gradient of its own log-probability (GSPO-token, equations 13 and 14), which is GSPO
    (equation 5) where a sequence's advantages are equal, and has a meaning where they are not.

    `num_tokens`: the sequences. Streams and reports: see `PolicyLoss`; `ratio` and what follows from it are of
    sequences.

    Args:
        epsilon: as of `ClippedPolicyLoss`. Ratios of sequences lie near 1: unset, with `epsilon_high`
            unset, the values of the paper's section 5.1, 3e-4 and 4e-4.
        epsilon_high: as of `ClippedPolicyLoss`.
        beta: as of `PolicyLoss`.
        entropy_coef: as of `PolicyLoss`.
        ignore_index: label that does not count.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: a number is out of its range.
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
            epsilon, epsilon_high = 3e-4, 4e-4 if epsilon_high is None else epsilon_high
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, ignore_index, **correction)

    def log_ratio(self, batch: LossBatch) -> Tensor:
        """Return [R]: the sequence's mean log ratio at each of its labels."""
        return sequence_log_ratio(batch, log_ratio(batch))


def sequence_log_ratio(batch: LossBatch, log_ratio_R: Tensor) -> Tensor:
    """Return [R]: each sequence's mean of `log_ratio_R`, with the gradient of the label's own log-probability."""
    mean_R = batch.spread(batch.feature_mean(log_ratio_R.detach()))
    return mean_R + batch.logps_R - batch.logps_R.detach()
