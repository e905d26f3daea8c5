"""The `cross_entropy` loss of the Tinker API: weighted negative log-probabilities of labels or targets."""

from torch import Tensor

from twinkle.loss.base import LossBatch
from twinkle.loss.errors import MissingStream
from twinkle.loss.tinker.base import TinkerLoss


class TinkerCrossEntropy(TinkerLoss):
    """`- sum of weight * log p`; weights may be negative, as `forward_backward_custom` requires.

    If the streams `target_ids` and `target_weights` give targets of shape [T, K], each label's term is
    `- weight * sum over k of weight_k * log p_k`.
    """

    optional_streams = ('target_ids', 'target_weights')
    candidate_stream = 'target_ids'
    are_candidates_targets = True

    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R], the negative log-probability of the label, or the weighted sum over its targets.

        Raises:
            MissingStream: there are several targets but no target weights.
        """
        if self.candidate_stream not in batch.streams:
            return -batch.logps_R
        if 'target_weights' not in batch.streams:
            raise MissingStream('cross_entropy', 'target_weights')
        return -(batch.stream('target_weights') * batch.output('candidate_logps')).sum(dim=-1)
