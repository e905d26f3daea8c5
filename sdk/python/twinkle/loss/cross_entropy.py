"""Cross-entropy, optionally with dynamic fine-tuning."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.options import check_choice, check_flag, check_whole


class CrossEntropyLoss(Loss):
    """`- sum over labels of weight * log p(label)`.

    Weights may be negative. With `reduction='sum'` this loss can therefore replace any custom loss: if the weights are
    the negated derivatives of the custom loss with respect to the log-probabilities, both losses have equal gradients.

    `dft` also scales each label by its probability, without gradient: `- sum of weight * sg(p) * log p`, Dynamic
    Fine-Tuning, arXiv 2508.05629, equation 9. The derivative with respect to a log-probability is then `- weight * p`.

    The divisor of the loss (`LossOutput.num_tokens`) is the number of labels for the reduction 'mean', and 0 (no
    division) for 'sum'. There are no metrics.

    Args:
        ignore_index: label value to ignore, in addition to -100.
        reduction: 'mean' divides the gradient at the step by the number of labels in all accumulated batches; 'sum'
            does not divide.
        dft: whether to scale labels by their probability.

    Raises:
        ValueError: an option is invalid.
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
