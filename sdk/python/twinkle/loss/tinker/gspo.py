"""The `gspo` loss of the Tinker API: a clipped policy objective with one ratio per datum."""

import torch
from torch import Tensor

from twinkle.loss.base import LossBatch
from twinkle.loss.errors import InvalidLossInput
from twinkle.loss.gspo import EPSILON_HIGH, EPSILON_LOW
from twinkle.loss.tinker.base import TinkerClippedLoss


class TinkerGSPO(TinkerClippedLoss):
    """`- sum of w min(s A, clip(s, low, high) A)`, where s is the geometric mean of the ratios r of a datum's labels.

    w is the weight of a label, and A its advantage. At each label, the gradient of log s is that of the label's
    log-probability. The mean is taken over the labels where the stream `sequence_ratio_mask` is not 0.

    Args:
        clip_low_threshold: see `TinkerClippedLoss`. Tinker publishes no default; the default is that of `GSPOLoss`.
        clip_high_threshold: see `clip_low_threshold`.

    Raises:
        ValueError: a bound is out of range.
    """

    required_streams = ('advantages', 'old_logps', 'sequence_ratio_mask')

    def __init__(
        self, clip_low_threshold: float = 1 - EPSILON_LOW, clip_high_threshold: float = 1 + EPSILON_HIGH
    ) -> None:
        super().__init__(clip_low_threshold, clip_high_threshold)

    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R], the negated clipped objective.

        Raises:
            InvalidLossInput: a datum's mask is 0 at all labels.
        """
        mask_R = (batch.stream('sequence_ratio_mask') != 0).to(batch.logps_R.dtype)
        count_S = batch.feature_sum(mask_R)
        if bool((count_S == 0).any()):
            index = int(batch.sequences[torch.argmin(count_S)])
            raise InvalidLossInput('has a sequence_ratio_mask of only zeros; mark at least one label', index=index)
        mean_S = batch.feature_sum(mask_R * self.log_ratio(batch).detach()) / count_S
        own_R = batch.logps_R - batch.logps_R.detach()
        return self.pessimistic((batch.spread(mean_S) + own_R).exp(), batch)
