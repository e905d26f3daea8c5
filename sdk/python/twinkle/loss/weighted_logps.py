"""A loss that is linear in the log-probabilities, with the caller's own coefficients."""

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.base import Loss, LossBatch
from twinkle.loss.options import check_whole


class WeightedLogpsLoss(Loss):
    """`sum over labels of weight * logprob_gradients * log p(label)`, so that a new algorithm needs no new loss.

    The stream `logprob_gradients`, float32 [R], is the gradient of the caller's own loss by each label's
    log-probability, with the sign and meaning it has in `backward(logprob_gradients=...)`: positive makes
    a token rarer. Computed beforehand from log-probabilities of the same weights, it gives the very
    gradient of any loss of them; see `twinkle.loss.custom`.

    `num_tokens`: 0, the coefficients are taken as they are. Reports nothing.

    Args:
        ignore_index: label that does not count.
    """

    required_streams = ('logprob_gradients',)

    def __init__(self, ignore_index: int = IGNORE_INDEX) -> None:
        self.ignore_index = check_whole('ignore_index', ignore_index)

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the weighted sum."""
        coefficients_R = batch.weights_R * batch.stream('logprob_gradients')
        return LossOutput(loss=(coefficients_R * batch.logps_R).sum(), num_tokens=0)
