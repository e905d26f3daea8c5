"""Tinker's `cross_entropy`."""

from torch import Tensor

from twinkle.loss.base import LossBatch
from twinkle.loss.errors import MissingStream
from twinkle.loss.tinker.base import TinkerLoss


class TinkerCrossEntropy(TinkerLoss):
    """`- sum of weight * log p`; weights may be negative, which `forward_backward_custom` builds on.

    Targets of shape [T, K] are the streams `target_ids` and `target_weights`: then it is
    `- sum over k of weight_k * log p_k` in the place of each label.
    """

    optional_streams = ('target_ids', 'target_weights')
    candidate_stream = 'target_ids'
    are_candidates_targets = True

    def per_label(self, batch: LossBatch) -> Tensor:
        """Return [R]: the negative log-probability, or the weighted sum of those of the targets.

        Raises:
            MissingStream: there are several targets, and no weights of theirs.
        """
        if self.candidate_stream not in batch.streams:
            return -batch.logps_R
        if 'target_weights' not in batch.streams:
            raise MissingStream('cross_entropy', 'target_weights')
        return -(batch.stream('target_weights') * batch.output('candidate_logps')).sum(dim=-1)
