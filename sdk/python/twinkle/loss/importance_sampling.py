"""Policy gradient with an importance ratio and no clipping."""

from typing import Unpack

from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.loss.base import LossBatch
from twinkle.loss.off_policy import CorrectionOptions
from twinkle.loss.options import check_choice
from twinkle.loss.policy import AGGREGATIONS, PolicyLoss


class ImportanceSamplingLoss(PolicyLoss):
    """`- r A`: the unclipped surrogate of arXiv 1707.06347, equation 6.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels if `loss_agg_mode` is 'token-mean',
    otherwise the number of sequences. For streams and metrics see `PolicyLoss`; the stream `old_logps` is required.

    Args:
        loss_agg_mode: see `PPOLoss`.
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
        """Return [R], the negated weighted advantage."""
        return -ratio_R * batch.stream('advantages')
