"""REINFORCE."""

from typing import Unpack

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_choice
from twinkle.loss.policy import AGGREGATIONS, PolicyLoss


class ReinforceLoss(PolicyLoss):
    """`- A log p`: the score-function gradient (Williams 1992, section 4), for samples of the present policy.

    With each sequence's advantage against the mean reward of its siblings it is RLOO, arXiv 2402.14740:
    give it what `twinkle.advantage.RLOOAdvantage` returns, equal over a sequence's labels.

    `num_tokens`: the sequences, or the labels with 'token-mean'. Streams: `advantages`; `ref_logps` where beta
    is not 0; `old_logps` only for the reports, see `PolicyLoss`.

    Args:
        loss_agg_mode: as of `PPOLoss`; the sum over a sequence is its log-probability, as in the papers.
        beta: as of `PolicyLoss`.
        entropy_coef: as of `PolicyLoss`.
        ignore_index: label that does not count.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: a number is out of its range, or the mode is unknown.
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
        """Return [R]: the weighted log-probability, negated."""
        del ratio_R
        return -batch.stream('advantages') * batch.logps_R
