"""Interface between the training engine and a loss.

A counted label is one that is not ignored and whose weight is not 0. The engine calls a loss with counted labels only.

Legend: R labels, S features with labels, F features, K candidates of a label, V vocabulary, D hidden size.
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
"""Outputs of the forward pass that a loss may request in addition to the labels' log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class LossBatch:
    """Labels of one adapter's batch, with the outputs and streams that its loss reads.

    Labels of weight 0 occur if their log-probabilities were requested; `counting` removes them before a loss is called.
    """

    logps_R: Tensor
    """float32 [R], with gradient: natural log-probability of each label."""
    labels_R: Tensor
    """int64 [R]."""
    weights_R: Tensor
    """float32 [R]: factor of each label's loss."""
    features_R: Tensor
    """int64 [R], ascending: index of each label's feature."""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 [R] or [R, K], or int64 [R, K], by name: streams that the loss declares and the features have."""
    entropies_R: Tensor | None = None
    """float32 [R], with gradient: entropy, in nats, of the distribution that predicts each label."""
    candidate_logps_RK: Tensor | None = None
    """float32 [R, K], with gradient: log-probabilities of the ids in the stream named by `Loss.candidate_stream`."""
    logits_RV: Tensor | None = None
    """float32 [R, V], with gradient: logits divided by the temperature of the pass."""
    embeddings_FD: Tensor | None = None
    """float32 [F, D], with gradient: hidden state after the final norm at each feature's last token."""
    values_R: Tensor | None = None
    """float32 [R], with gradient: output of the value head at the row that predicts each label."""

    @cached_property
    def sequences(self) -> Tensor:
        """int64 [S], ascending: indexes of the features with labels."""
        return torch.unique_consecutive(self.features_R)

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [S]: number of labels of each feature in `sequences`."""
        return torch.unique_consecutive(self.features_R, return_counts=True)[1]

    @property
    def label_count(self) -> int:
        """Number of labels, R."""
        return len(self.labels_R)

    @property
    def sequence_count(self) -> int:
        """Number of features with labels, S."""
        return len(self.lengths)

    def feature_sum(self, values_R: Tensor) -> Tensor:
        """Return [S], the sum of `values_R` over each feature's labels."""
        # Segments are reduced in order, without atomics: sums are bitwise reproducible and independent of other
        # features.
        if not len(values_R):
            return values_R
        return torch.segment_reduce(values_R, 'sum', lengths=self.lengths)

    def feature_mean(self, values_R: Tensor) -> Tensor:
        """Return [S], the mean of `values_R` over each feature's labels."""
        return self.feature_sum(values_R) / self.lengths

    def spread(self, values_S: Tensor) -> Tensor:
        """Return [R], each feature's value repeated for its labels."""
        return values_S.repeat_interleave(self.lengths)

    def stream(self, name: str) -> Tensor:
        """Return a stream by name.

        Raises:
            MissingStream: the features do not have the stream.
        """
        if name not in self.streams:
            raise MissingStream('the loss', name)
        return self.streams[name]

    def output(self, name: str) -> Tensor:
        """Return one of `OUTPUT_NAMES`.

        Raises:
            MissingOutput: the forward pass did not compute the output.
        """
        suffix = {'candidate_logps': '_RK', 'embeddings': '_FD', 'logits': '_RV'}.get(name, '_R')
        value = getattr(self, name + suffix)
        if value is None:
            raise MissingOutput(name)
        return value

    def counting(self) -> 'LossBatch':
        """Return the batch without labels of weight 0."""
        return self.select(self.weights_R != 0)

    def select(self, index_R: Tensor) -> 'LossBatch':
        """Return the batch restricted to some rows, given as a mask, bool [R], or ascending indexes, int64."""
        rows = {
            entry.name: getattr(self, entry.name)[index_R]
            for entry in fields(self)
            if entry.name.endswith(('_R', '_RK', '_RV')) and getattr(self, entry.name) is not None
        }
        return replace(self, **rows, streams={name: values[index_R] for name, values in self.streams.items()})


class Loss(ABC):
    """Base class of losses. A custom loss is a subclass, or any callable with the signature of `__call__`.

    Declarations are class attributes, or instance attributes where they depend on options.

    Concurrency: losses are stateless; one instance may serve many batches.
    """

    ignore_index: int = IGNORE_INDEX
    """Label value to ignore, in addition to `IGNORE_INDEX`."""
    is_separable: bool = True
    """Whether the loss and `num_tokens` of a batch are sums over its groups of features, so that a large batch can
    run in parts."""
    group_size: int = 1
    """Number of consecutive features that must stay in the same part; 2 for pairs."""
    required_streams: tuple[str, ...] = ()
    """Streams that every feature must have."""
    optional_streams: tuple[str, ...] = ()
    """Streams that the loss reads if every feature of the batch has them."""
    required_outputs: tuple[str, ...] = ()
    """Names from `OUTPUT_NAMES` that the loss reads."""
    candidate_stream: str = ''
    """Name of the int64 [R, K] stream with the ids of the candidates. If the features have it, the forward pass
    computes `candidate_logps`. Empty for losses without candidates."""
    are_candidates_targets: bool = False
    """Whether candidates replace the label, so that a batch returns their log-probabilities."""
    takes_every_label: bool = False
    """Whether to compute log-probabilities of labels of weight 0 too, and to train on batches with no other labels. The
    loss is still called with counted labels only."""

    @abstractmethod
    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the loss as a sum, a scalar with gradient.

        The optimizer step divides the gradient by the accumulated `num_tokens`; 0 means no division.
        """
