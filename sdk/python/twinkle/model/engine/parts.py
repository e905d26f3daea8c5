"""Validation of a batch and its division into parts.

The division depends on the batch, its loss and options, the adapter, the model and the size of a pass, but not on the
other adapters in the passes. Gradients are therefore summed in the same order, unless memory runs out and a part is
divided in two.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np

from twinkle.data_format import InputFeature
from twinkle.loss import MissingStream
from twinkle.model.engine.purpose import Purpose
from twinkle.model.errors import InvalidArgument
from twinkle.nn import PackedModel
from twinkle.processor import InputLimits, InvalidFeatures, PackedBatch, PrefixTree, PrefixTreeBuilder

_MAX_SHARING = 8
"""Maximum ratio of a part's tokens to the rows of a pass. It limits the memory for labels and for copies of keys."""
_MAX_LOGITS = 2**26
"""Maximum number of logits in a pass whose loss reads all of them: 256 MiB as float32."""


@dataclass(frozen=True)
class Part:
    """Consecutive features of a batch, packed."""

    features: Sequence[InputFeature]
    first_feature: int
    """Index of the first feature in the batch."""
    batch: PackedBatch
    tree: PrefixTree
    """Rows of the batch that a pass computes."""
    planned_rows: int
    """Number of rows that the part counts for in a pass: its computed rows, or more if they represent many tokens."""


class BatchCutter:
    """Validates, packs and divides batches for one model.

    Args:
        model: model that the batches are for.
        max_pass_tokens: maximum number of rows that a part computes, unless features that must stay together exceed it.
    """

    def __init__(self, model: PackedModel, *, max_pass_tokens: int) -> None:
        self._max_pass_tokens = max_pass_tokens
        self._model = model
        self._max_logit_rows = max(1, _MAX_LOGITS // model.vocab_size)
        self._limits = InputLimits(
            vocab_size=model.vocab_size,
            max_tokens=model.max_position_embeddings,
            media=model.media,
            routing=None if model.routing is None else astuple(model.routing),
        )

    def pack(self, purpose: Purpose, features: Sequence[InputFeature]) -> PackedBatch:
        """Validate and pack a whole batch.

        Raises:
            InvalidFeatures: a feature is invalid, or the features do not form whole groups of the loss.
            MissingStream: the batch is for training, and its features lack a stream that the loss requires.
            InvalidArgument: the loss or the caller needs an output that the adapter or the base model does not have, or
                the caller requests the experts of masked tokens.
        """
        purpose.check()
        loss = purpose.loss
        if len(features) % loss.group_size:
            raise InvalidFeatures(
                f'must come in groups of {loss.group_size} for {type(loss).__name__}, got {len(features)}'
            )
        batch = purpose.state.processor(features, self._limits, needs=purpose.feature_needs)
        if 'routed_experts' in purpose.options.more_outputs:
            self._check_recordable(batch)
        missing = purpose.missing_streams(batch)
        # Forward-only batches often compute the log-probabilities that later become the missing stream.
        if missing and purpose.is_training:
            raise MissingStream(type(loss).__name__, missing[0])
        return batch

    def _check_recordable(self, batch: PackedBatch) -> None:
        if self._limits.routing is None:
            raise InvalidArgument(
                'routed_experts cannot be returned: the base model has no routers that report them, or '
                'ulysses_size is above 1; leave out return_routed_experts'
            )
        if batch.token_count != sum(batch.feature_lengths):
            raise InvalidArgument('routed_experts cannot be returned for masked tokens; remove tokens with a mask of 0')

    def cut(self, purpose: Purpose, features: Sequence[InputFeature]) -> list[Part]:
        """Validate a whole batch and divide it into as many parts as it needs.

        Raises:
            InvalidArgument: the loss needs the whole batch in one pass, and `micro_batch_size` is smaller.
            InvalidFeatures, MissingStream, InvalidArgument: see `pack`.
        """
        whole = self.part(purpose, features)
        max_rows, max_features = self._limit(purpose), purpose.options.micro_batch_size or len(features)
        if not purpose.loss.is_separable:
            if len(features) > max_features:
                raise InvalidArgument(
                    f'micro_batch_size {max_features}: {purpose.loss_name} compares all examples of a batch, so they '
                    f'must be in one pass; leave micro_batch_size out or set it to {len(features)}'
                )
            return [whole]
        if whole.planned_rows <= max_rows and len(features) <= max_features:
            return [whole]
        limits = _PartLimits(max_rows, max_features, is_shared=self._is_shared(purpose))
        return self._parts(purpose, whole, _cuts(whole.batch, purpose.loss.group_size, limits))

    def part(self, purpose: Purpose, features: Sequence[InputFeature], *, first_feature: int = 0) -> Part:
        """Validate features and return them as one part.

        Raises:
            InvalidArgument, InvalidFeatures, MissingStream: see `pack`.
        """
        batch = self.pack(purpose, features)
        is_shared = len(batch.sequence_bounds) > 1 and self._is_shared(purpose)
        tree = PrefixTree.of(batch) if is_shared else PrefixTree.unshared(batch)
        planned_rows = max(tree.row_count, -(-batch.token_count // _MAX_SHARING))
        return Part(features, first_feature, batch, tree, planned_rows)

    def halve(self, purpose: Purpose, part: Part) -> list[Part]:
        """Divide a part into two parts of about as many groups; return an empty list if the part is indivisible."""
        size = purpose.loss.group_size
        group_count = len(part.features) // size
        if group_count < 2 or not purpose.loss.is_separable:
            return []
        return self._parts(purpose, part, [0, group_count // 2 * size, len(part.features)])

    def _limit(self, purpose: Purpose) -> int:
        if purpose.is_needed('logits'):
            return min(self._max_pass_tokens, self._max_logit_rows)
        return self._max_pass_tokens

    def _parts(self, purpose: Purpose, whole: Part, cuts: Sequence[int]) -> list[Part]:
        return [
            self.part(purpose, whole.features[begin:end], first_feature=whole.first_feature + begin)
            for begin, end in pairwise(cuts)
        ]

    def _is_shared(self, purpose: Purpose) -> bool:
        """Return whether rows with equal prefixes may be computed once.

        With dropout they may not, because the masks of equal rows differ. If logits are needed, a pass has so few rows
        that sharing would save little.
        """
        config = purpose.state.weights.config
        has_dropout = purpose.is_training and config is not None and config.lora_dropout > 0
        return self._model.can_share_prefixes and not has_dropout and not purpose.is_needed('logits')


@dataclass(frozen=True)
class _PartLimits:
    max_rows: int
    max_features: int
    is_shared: bool
    """Whether rows with equal prefixes count once."""


def _cuts(batch: PackedBatch, group_size: int, limits: _PartLimits) -> list[int]:
    """Return the boundaries of the parts; each part has as many groups as fit, but at least one."""
    sequences, cuts, rows, tokens = _sequences_by_feature(batch), [0], 0, 0
    builder = PrefixTreeBuilder(batch) if limits.is_shared else None
    for begin in range(0, len(sequences), group_size):
        group = [bounds for own in sequences[begin : begin + group_size] for bounds in own]
        token_count = sum(last - first for first, last in group)
        row_count = token_count if builder is None else sum(builder.add(*bounds) for bounds in group)
        is_large = rows + row_count > limits.max_rows or tokens + token_count > limits.max_rows * _MAX_SHARING
        if begin > cuts[-1] and (is_large or begin + group_size - cuts[-1] > limits.max_features):
            cuts.append(begin)
            rows, tokens = 0, 0
            if builder is not None:
                builder.restart()
                row_count = sum(builder.add(*bounds) for bounds in group)
        rows, tokens = rows + row_count, tokens + token_count
    return [*cuts, len(sequences)]


def _sequences_by_feature(batch: PackedBatch) -> list[list[tuple[int, int]]]:
    """Return the bounds of the sequences of each feature."""
    ends = batch.last_rows_F + 1
    features: list[list[tuple[int, int]]] = [[] for _ in ends]
    for bounds in batch.sequence_bounds:
        features[int(np.searchsorted(ends, bounds[1]))].append(bounds)
    return features
