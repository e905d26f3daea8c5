"""The policy gradient with an importance ratio and no clip."""

from typing import Unpack

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_choice
from twinkle.loss.policy import AGGREGATIONS, PolicyLoss


class ImportanceSamplingLoss(PolicyLoss):
    """`- r A`: the surrogate PPO starts from, arXiv 1707.06347, equation 6.

    `num_tokens`: the labels with 'token-mean', else the sequences. Streams and reports: see `PolicyLoss`;
    `old_logps` are required here, as the ratio is all there is.

    Args:
        loss_agg_mode: as of `PPOLoss`.
        beta: as of `PolicyLoss`.
        entropy_coef: as of `PolicyLoss`.
        ignore_index: label that does not count.
        correction: see `CorrectionOptions`.

    Raises:
        ValueError: a number is out of its range, or the mode is unknown.
    """

    def __init__(
        self,
        loss_agg_mode: str = 'token-mean',
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = IGNORE_INDEX,
        **correction: Unpack[CorrectionOptions],
    ) -> None:
        super().__init__(beta=beta, entropy_coef=entropy_coef, ignore_index=ignore_index, **correction)
        self.aggregation = check_choice('loss_agg_mode', loss_agg_mode, AGGREGATIONS)
        self.required_streams = (*self.required_streams, 'old_logps')
        self.optional_streams = ()

    def surrogate(self, ratio_R: Tensor, batch: LossBatch) -> Tensor:
        """Return [R]: the weighted advantage, negated."""
        return -ratio_R * batch.stream('advantages')
