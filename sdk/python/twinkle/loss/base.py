"""The seam between the trainer and a loss.

Legend: R labels that count, S features that have such labels, F features, K candidates of a label,
V vocabulary, D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.loss.errors import MissingOutput, MissingStream

OUTPUT_NAMES = ('candidate_logps', 'embeddings', 'entropies', 'logits', 'values')
"""What a loss may ask of the forward pass beside the labels' log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class LossBatch:
    """What a loss may read: one element for each label that counts, of one adapter's batch alone."""

    logps_R: Tensor
    """float32 [R], with gradient: natural log-probability of each label."""
    labels_R: Tensor
    """int64 [R]."""
    weights_R: Tensor
    """float32 [R]: factor of each label's loss, never 0."""
    features_R: Tensor
    """int64 [R], rising: index of the feature each label belongs to."""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 [R] or [R, K], or int64 [R, K], by name: what the loss declares and the features carry."""
    entropies_R: Tensor | None = None
    """float32 [R], with gradient: entropy in nats of the distribution each label is drawn from."""
    candidate_logps_RK: Tensor | None = None
    """float32 [R, K], with gradient: log-probabilities of the ids in the stream `Loss.candidate_stream`."""
    logits_RV: Tensor | None = None
    """float32 [R, V], with gradient: logits, divided by the temperature of the pass."""
    embeddings_FD: Tensor | None = None
    """float32 [F, D], with gradient: hidden state after the final norm at each feature's last token."""
    values_R: Tensor | None = None
    """float32 [R], with gradient: the value head at the row that predicts each label."""

    @cached_property
    def sequences(self) -> Tensor:
        """int64 [S], rising: index of each feature that has labels."""
        return torch.unique_consecutive(self.features_R)

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [S]: labels of each such feature."""
        return torch.unique_consecutive(self.features_R, return_counts=True)[1]

    @property
    def label_count(self) -> int:
        """R."""
        return len(self.labels_R)

    @property
    def sequence_count(self) -> int:
        """S."""
        return len(self.lengths)

    def feature_sum(self, values_R: Tensor) -> Tensor:
        """Return [S]: the sum of `values_R` within each feature that has labels."""
        # Segment by segment, in order: no atomics, so the bits are the same on every run and do not
        # depend on the other features.
        if not len(values_R):
            return values_R
        return torch.segment_reduce(values_R, 'sum', lengths=self.lengths)

    def feature_mean(self, values_R: Tensor) -> Tensor:
        """Return [S]: the mean of `values_R` over the labels of each feature that has any."""
        return self.feature_sum(values_R) / self.lengths

    def spread(self, values_S: Tensor) -> Tensor:
        """Return [R]: each feature's value at each of its labels."""
        return values_S.repeat_interleave(self.lengths)

    def stream(self, name: str) -> Tensor:
        """Return a stream.

        Raises:
            MissingStream: the features do not carry it.
        """
        if name not in self.streams:
            raise MissingStream('the loss', name)
        return self.streams[name]

    def output(self, name: str) -> Tensor:
        """Return one of `OUTPUT_NAMES`.

        Raises:
            MissingOutput: the forward pass did not give it.
        """
        suffix = {'candidate_logps': '_RK', 'embeddings': '_FD', 'logits': '_RV'}.get(name, '_R')
        value = getattr(self, name + suffix)
        if value is None:
            raise MissingOutput(name)
        return value

    def counting(self) -> 'LossBatch':
        """Return the batch without labels of weight 0, for a trainer that computed some for their log-probabilities."""
        return self.select(self.weights_R != 0)

    def select(self, index_R: Tensor) -> 'LossBatch':
        """Return the batch with the given rows alone: a mask bool [R], or rising indexes int64."""
        rows = {
            entry.name: getattr(self, entry.name)[index_R]
            for entry in fields(self)
            if entry.name.endswith(('_R', '_RK', '_RV')) and getattr(self, entry.name) is not None
        }
        return replace(self, **rows, streams={name: values[index_R] for name, values in self.streams.items()})


class Loss(ABC):
    """A loss. Subclass it, or give any callable of the same form, for one of your own.

    What it declares may be an attribute of the class or, where it depends on options, of the instance.

    Concurrency: stateless; one instance may serve many batches.
    """

    ignore_index: int = IGNORE_INDEX
    """Label that does not count."""
    is_separable: bool = True
    """Whether loss and `num_tokens` of a batch are the sums over its groups of features, so that a
    large batch may run in parts."""
    group_size: int = 1
    """Features come in groups of this many, one after the other, that are not parted: 2 for pairs."""
    required_streams: tuple[str, ...] = ()
    """Streams every feature must carry."""
    optional_streams: tuple[str, ...] = ()
    """Streams read where every feature of the batch carries them."""
    required_outputs: tuple[str, ...] = ()
    """Those of `OUTPUT_NAMES` the loss reads."""
    candidate_stream: str = ''
    """The int64 [R, K] stream whose ids `candidate_logps` are of, where the features carry it."""
    are_candidates_targets: bool = False
    """Whether the candidates stand in the label's place, so that their log-probabilities are what a batch answers."""
    takes_every_label: bool = False
    """Whether the log-probabilities of labels of weight 0 are wanted too, and a batch of nothing else is a batch."""

    @abstractmethod
    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the loss as a sum, a scalar with gradient.

        `num_tokens` is what the gradient is divided by at the step; 0 for not at all.
        """
