"""Policy loss of Proximal Policy Optimization."""

from typing import Unpack

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_choice
from twinkle.loss.policy import AGGREGATIONS, ClippedPolicyLoss


class PPOLoss(ClippedPolicyLoss):
    """Clipped objective of arXiv 1707.06347, equation 7; the critic's loss is `PPOValueLoss`.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels if `loss_agg_mode` is 'token-mean',
    otherwise the number of sequences. For streams and metrics see `PolicyLoss`.

    Args:
        loss_agg_mode: 'token-mean' averages over all labels, 'seq-mean-token-mean' over each sequence and then
            over sequences, 'seq-mean-token-sum' sums over each sequence and averages over sequences.
        epsilon: see `ClippedPolicyLoss`.
        epsilon_high: see `ClippedPolicyLoss`.
        beta: see `PolicyLoss`.
        entropy_coef: see `PolicyLoss`.
        ignore_index: label value to ignore, in addition to -100.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: an option is unknown or invalid.
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
