"""Proximal Policy Optimization: the policy."""

from typing import Unpack

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_choice
from twinkle.loss.policy import AGGREGATIONS, ClippedPolicyLoss


class PPOLoss(ClippedPolicyLoss):
    """The clipped objective of arXiv 1707.06347, equation 7; for the critic see `PPOValueLoss`.

    `num_tokens`: the labels with 'token-mean', else the sequences. Streams and reports: see `PolicyLoss`.

    Args:
        loss_agg_mode: 'token-mean' averages over all labels, 'seq-mean-token-mean' over each sequence's and
            then over sequences, 'seq-mean-token-sum' over sequences only.
        epsilon: as of `ClippedPolicyLoss`.
        epsilon_high: as of `ClippedPolicyLoss`.
        beta: as of `PolicyLoss`.
        entropy_coef: as of `PolicyLoss`.
        ignore_index: label that does not count.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: a number is out of its range, or the mode is none of these.
    """

    def __init__(
        self,
        loss_agg_mode: str = 'token-mean',
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        **correction: Unpack[CorrectionOptions],
    ) -> None:
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, ignore_index, **correction)
        self.aggregation = check_choice('loss_agg_mode', loss_agg_mode, AGGREGATIONS)
