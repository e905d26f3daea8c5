"""Cross-entropy against several weighted tokens at each place."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.options import check_choice, check_whole


class SoftCrossEntropyLoss(Loss):
    """`- sum over labels r and candidates k of weight_r * target_weights_rk * log p(target_ids_rk)`.

    For distillation into the K likeliest tokens of a teacher, and what `target_tokens` of shape [T, K] mean
    in Tinker's `cross_entropy`. The label of a place only says that it counts. Streams: `target_ids`, int64
    [R, K]; `target_weights`, float32 [R, K], of any sign and sum; 0 for a candidate to be left out.

    `num_tokens`: the labels, with 'mean'; 0 with 'sum'. Reports nothing.

    Args:
        ignore_index: label that does not count.
        reduction: 'mean' or 'sum', as of `CrossEntropyLoss`.

    Raises:
        ValueError: the reduction is neither.
    """

    required_streams = ('target_ids', 'target_weights')
    required_outputs = ('candidate_logps',)
    candidate_stream = 'target_ids'
    are_candidates_targets = True

    def __init__(self, ignore_index: int = IGNORE_INDEX, reduction: str = 'mean') -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)
        self.reduction = check_choice('reduction', reduction, ('mean', 'sum'))

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the weighted sum."""
        targets_RK = batch.weights_R[:, None] * batch.stream('target_weights')
        loss = -(targets_RK * batch.output('candidate_logps')).sum()
        return LossOutput(loss=loss, num_tokens=batch.label_count if self.reduction == 'mean' else 0)
