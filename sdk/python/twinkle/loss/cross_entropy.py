"""Cross-entropy, plain and with dynamic fine-tuning."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.options import check_choice, check_flag, check_whole


class CrossEntropyLoss(Loss):
    """`- sum over labels of weight * log p(label)`.

    Weights may be negative, so with `reduction='sum'` this is also the linear loss to which a custom one
    reduces: weights of minus the gradient by each log-probability give its gradient.

    With `dft`, each label is also scaled by its own probability, which the gradient does not see:
    `- sum of weight * sg(p) * log p`, Dynamic Fine-Tuning, arXiv 2508.05629,
    equation 9. There the gradient by a log-probability is `- weight * p`.

    `num_tokens`: the labels, with 'mean'; 0 with 'sum'. Reports nothing.

    Args:
        ignore_index: label that does not count.
        reduction: 'mean' divides the gradient at the step by the number of labels accumulated since the
            last one, so that accumulation steps of unequal length weigh by their labels; 'sum' leaves it.
        dft: scale by the probability.

    Raises:
        ValueError: the reduction is neither.
    """

    def __init__(self, ignore_index: int = IGNORE_INDEX, reduction: str = 'mean', *, dft: bool = False) -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)
        self.reduction = check_choice('reduction', reduction, ('mean', 'sum'))
        self.dft = check_flag('dft', dft)

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the weighted sum."""
        logps_R = batch.logps_R
        loss_R = batch.weights_R * logps_R
        if self.dft:
            loss_R = loss_R * logps_R.detach().exp()
        return LossOutput(loss=-loss_R.sum(), num_tokens=batch.label_count if self.reduction == 'mean' else 0)
