"""REINFORCE policy gradient."""

from typing import Unpack

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_choice
from twinkle.loss.policy import AGGREGATIONS, PolicyLoss


class ReinforceLoss(PolicyLoss):
    """`- A log p`: the score-function gradient (Williams 1992, section 4), for samples of the current policy.

    With the advantages of `twinkle.advantage.RLOOAdvantage`, repeated for each label of a sequence, this is RLOO,
    arXiv 2402.14740.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels if `loss_agg_mode` is 'token-mean',
    otherwise the number of sequences. For streams and metrics see `PolicyLoss`; only metrics and a
    `correction` use `old_logps`.

    Args:
        loss_agg_mode: see `PPOLoss`; the default sums over a sequence, which gives its log-probability.
        beta: see `PolicyLoss`.
        entropy_coef: see `PolicyLoss`.
        ignore_index: label value to ignore, in addition to -100.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: an option is unknown or invalid.
    """

    def __init__(
        self,
        loss_agg_mode: str = 'seq-mean-token-sum',
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        **correction: Unpack[CorrectionOptions],
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, ignore_index=ignore_index, **correction)
        self.aggregation = check_choice('loss_agg_mode', loss_agg_mode, AGGREGATIONS)

    def surrogate(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R], the negated weighted log-probability."""
        del ratio_R
        return -batch.stream('advantages') * batch.logps_R
