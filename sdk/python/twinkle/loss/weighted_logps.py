"""Loss that is linear in the log-probabilities, with coefficients from the caller."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.options import check_whole


class WeightedLogpsLoss(Loss):
    """`sum over labels of weight * logprob_gradients * log p(label)`, which can have the gradient of any other loss.

    The stream `logprob_gradients`, float32 [R], is the derivative of the caller's loss with respect to each label's
    log-probability, as in `backward(logprob_gradients=...)`: a positive value makes a token less likely. If the caller
    computes it from log-probabilities of the same weights, this loss has exactly the gradient of the caller's loss; see
    `twinkle.loss.custom`.

    The divisor of the loss (`LossOutput.num_tokens`) is 0: the gradient is not divided. There are no metrics.

    Args:
        ignore_index: label value to ignore, in addition to -100.

    Raises:
        ValueError: `ignore_index` is not an integer.
    """

    required_streams = ('logprob_gradients',)

    def __init__(self, ignore_index: int = IGNORE_INDEX) -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the weighted sum."""
        coefficients_R = batch.weights_R * batch.stream('logprob_gradients')
        return LossOutput(loss=(coefficients_R * batch.logps_R).sum(), num_tokens=0)
