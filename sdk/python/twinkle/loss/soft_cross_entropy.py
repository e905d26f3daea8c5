"""Cross-entropy with several weighted target tokens per position."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.options import check_choice, check_whole


class SoftCrossEntropyLoss(Loss):
    """`- sum over labels r and candidates k of weight_r * target_weights_rk * log p(target_ids_rk)`.

    Use it to distill a teacher from its K most likely tokens per position. It corresponds to Tinker's `cross_entropy`
    with several `target_tokens` per position. Labels only mark the positions that count. The streams are `target_ids`,
    int64 [R, K], and `target_weights`, float32 [R, K]. Weights may have any sign and sum; a weight of 0 disables a
    candidate.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels for the reduction 'mean', and 0 (no
    division) for 'sum'. There are no metrics.

    Args:
        ignore_index: label value to ignore, in addition to -100.
        reduction: 'mean' or 'sum', see `CrossEntropyLoss`.

    Raises:
        ValueError: an option is invalid.
    """

    required_streams = ('target_ids', 'target_weights')
    required_outputs = ('candidate_logps',)
    candidate_stream = 'target_ids'
    are_candidates_targets = True

    def __init__(self, ignore_index: int = IGNORE_INDEX, reduction: str = 'mean') -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)
        self.reduction = check_choice('reduction', reduction, ('mean', 'sum'))

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the negative weighted sum and its divisor."""
        targets_RK = batch.weights_R[:, None] * batch.stream('target_weights')
        loss = -(targets_RK * batch.output('candidate_logps')).sum()
        return LossOutput(loss=loss, num_tokens=batch.label_count if self.reduction == 'mean' else 0)
