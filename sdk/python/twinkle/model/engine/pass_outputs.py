"""Forward pass over rows of several adapters, and the outputs that their losses read.

Legend: N computed rows of the pass, M computed rows of one adapter, T tokens of one adapter, R rows of one adapter with
a label, F features of one adapter, D hidden size, V vocabulary, K candidates of a label.

All values of a loss are computed row by row, or only from rows of its adapter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinkle.loss import LossBatch
from twinkle.model.engine.adapter_state import SegmentOutputs
from twinkle.model.engine.purpose import Purpose
from twinkle.nn import (
    AdapterSpan,
    ExpertRouting,
    HeadAdapter,
    HeadOutputs,
    MediaSpan,
    PackedModel,
    RoutingShape,
    RowDropout,
    SequenceSpan,
)
from twinkle.nn.rows import block_rows
from twinkle.processor import PackedBatch, PrefixTree, join_positions


@dataclass(frozen=True)
class SegmentDropout:
    """Dropout of one adapter in a pass: at its layers, and at the output head if the adapter changes it."""

    layers: RowDropout | None = None
    head: RowDropout | None = None

    @classmethod
    def sample(cls, purpose: Purpose, model: PackedModel) -> 'SegmentDropout':
        """Sample the dropout of the next pass; without dropout, or if the pass is not for training, sample nothing."""
        if not purpose.is_training or purpose.options.is_adapter_disabled:
            return cls()
        weights = purpose.state.weights
        has_head = weights.update_of(model.head_path) is not None
        return cls(weights.sample_dropout(), weights.sample_dropout() if has_head else None)

    def of_half(self, index: int) -> 'SegmentDropout':
        """Return the dropout of one half of the rows; see `RowDropout.of_half`."""
        halves = [None if dropout is None else dropout.of_half(index) for dropout in (self.layers, self.head)]
        return SegmentDropout(*halves)


@dataclass(frozen=True)
class Segment:
    """Input of one adapter in a pass."""

    purpose: Purpose
    batch: PackedBatch
    tree: PrefixTree
    """Rows of the batch that the pass computes."""
    dropout: SegmentDropout
    is_gradient_given: bool = False
    """Whether the caller computes the gradients of the log-probabilities, which may include labels of weight 0."""

    @property
    def learned(self) -> npt.NDArray[np.bool_]:
        """Whether each label's log-probability can have a gradient, bool [R]; losses do not read labels of weight 0."""
        return np.full(self.batch.label_count, True) if self.is_gradient_given else self.batch.weights_R != 0

    @property
    def candidate_ids(self) -> npt.NDArray[np.int64] | None:
        """int64 [R, K]: ids whose log-probabilities the loss reads in addition to the labels'."""
        return self.batch.streams.get(self.purpose.loss.candidate_stream)

    def head_adapter(self, model: PackedModel) -> HeadAdapter | None:
        """Return the adapter's update of the head with its dropout, or None if it does not change the head."""
        if self.purpose.options.is_adapter_disabled:
            return None
        update = self.purpose.state.weights.update_of(model.head_path)
        return None if update is None else HeadAdapter(update, self.dropout.head, first_layer=len(model.layers))

    @property
    def head_needs(self) -> tuple[bool, int]:
        """Whether the head must compute entropies, and the number of candidates per label that it must score."""
        ids_RK = self.candidate_ids
        return self.purpose.is_needed('entropies'), 0 if ids_RK is None else ids_RK.shape[1]


def forward_outputs(model: PackedModel, segments: Sequence[Segment]) -> list[SegmentOutputs]:
    """Run a pass and return each segment's outputs, with gradients according to torch's grad mode.

    Either all segments are for training, or none.
    """
    routing = None if model.routing is None else _routing(model.routing, segments, _copier(model))
    hidden_ND = _hidden(model, segments, routing)
    to_device = _copier(model)
    begins, rows, counts = [0], list[npt.NDArray[np.int64]](), list[int]()
    for segment in segments:
        rows.append(segment.tree.computed_T[segment.batch.rows_R] + begins[-1])
        counts.append(len(rows[-1]))
        begins.append(begins[-1] + segment.tree.row_count)
    hiddens = _select_rows(hidden_ND, to_device(np.concatenate(rows))).split(counts)
    results: dict[int, SegmentOutputs] = {}
    adapters = [segment.head_adapter(model) for segment in segments]
    # Segments that need the same outputs of the head share one call, so the model's largest matrix is read once.
    kinds = [
        (segment.head_needs, 0 if adapter is None else index + 1)
        for index, (segment, adapter) in enumerate(zip(segments, adapters, strict=True))
    ]
    for _, group in groupby(sorted(range(len(segments)), key=kinds.__getitem__), key=kinds.__getitem__):
        indexes = list(group)
        own_segments, own_hiddens = ([items[index] for index in indexes] for items in (segments, hiddens))
        heads = _head_outputs(model, own_segments, own_hiddens, adapters[indexes[0]])
        for index, head in zip(indexes, heads, strict=True):
            own_MD = hidden_ND[begins[index] : begins[index + 1]]
            rest = _other_outputs(model, segments[index], hiddens[index], own_MD)
            results[index] = _segment_outputs(model, segments[index], hiddens[index], {**head, **rest})
    outputs = [results[index] for index in range(len(segments))]
    return outputs if routing is None else _with_experts(outputs, segments, routing.chosen(begins[-1]))


def _routing(
    shape: RoutingShape, segments: Sequence[Segment], to_device: Callable[[npt.NDArray[Any]], Tensor]
) -> ExpertRouting | None:
    """Return the object that records or replays the experts of the pass; None if no segment gives or requests them."""
    given = [segment.batch.routed_experts_TLA for segment in segments]
    if all(own is None for own in given):
        is_recorded = any('routed_experts' in segment.purpose.options.more_outputs for segment in segments)
        return ExpertRouting(shape) if is_recorded else None
    free = (shape.layer_count, shape.choice_count)
    filled = [
        np.full((segment.tree.row_count, *free), -1) if own is None else own[segment.tree.rows_N]
        for segment, own in zip(segments, given, strict=True)
    ]
    return ExpertRouting(shape, to_device(np.concatenate(filled)))


def _with_experts(
    outputs: Sequence[SegmentOutputs], segments: Sequence[Segment], chosen_NLA: Tensor
) -> list[SegmentOutputs]:
    """Return the outputs with the experts of the segments that request them."""
    parts = chosen_NLA.split([segment.tree.row_count for segment in segments])
    return [
        replace(output, routed_experts_TLA=part[torch.from_numpy(segment.tree.computed_T).to(part.device)])
        if 'routed_experts' in segment.purpose.options.more_outputs
        else output
        for output, segment, part in zip(outputs, segments, parts, strict=True)
    ]


def _hidden(model: PackedModel, segments: Sequence[Segment], routing: ExpertRouting | None) -> Tensor:
    to_device = _copier(model)
    sequences: list[SequenceSpan] = []
    adapters: list[AdapterSpan] = []
    media: list[MediaSpan] = []
    row = 0
    for segment in segments:
        first, tree = len(sequences), segment.tree
        sequences += [
            SequenceSpan(
                row + span.begin_row,
                row + span.end_row,
                parent=None if span.parent is None else first + span.parent,
            )
            for span in tree.spans
        ]
        weights = None if segment.purpose.options.is_adapter_disabled else segment.purpose.state.weights
        adapters.append(AdapterSpan(row, row + tree.row_count, weights, segment.dropout.layers))
        # Sequences with media share no rows, so the rows of an image stay consecutive.
        begins = [row + int(tree.computed_T[one.begin_row]) for one in segment.batch.media]
        media += [
            MediaSpan(begin, begin + one.end_row - one.begin_row, one.kind, to_device(one.patches_PC), one.grid)
            for begin, one in zip(begins, segment.batch.media, strict=True)
        ]
        row += tree.row_count
    return model.hidden(
        to_device(np.concatenate([segment.batch.input_ids_T[segment.tree.rows_N] for segment in segments])),
        to_device(join_positions([segment.batch.position_ids_T[..., segment.tree.rows_N] for segment in segments])),
        sequences=sequences,
        adapters=adapters,
        media=media,
        routing=routing,
    )


def _head_outputs(
    model: PackedModel, segments: Sequence[Segment], hiddens: Sequence[Tensor], adapter: HeadAdapter | None
) -> list[dict[str, Tensor]]:
    """Return the head's outputs for segments with the same needs, or for one segment whose adapter changes the head."""
    to_device = _copier(model)
    counts = [segment.batch.label_count for segment in segments]
    temperatures = [segment.purpose.options.temperature for segment in segments]
    is_entropy_needed, candidate_count = segments[0].head_needs
    hidden_RD = torch.cat(list(hiddens))
    labels_R = to_device(np.concatenate([segment.batch.labels_R for segment in segments]))
    temperature_R = to_device(np.repeat(np.array(temperatures, np.float32), counts))
    if adapter is None and not is_entropy_needed and not candidate_count:
        is_learned_R = np.concatenate([segment.learned for segment in segments])
        outputs = HeadOutputs(_label_logps(model, hidden_RD, labels_R, temperature_R, is_learned_R=is_learned_R))
    else:
        outputs = model.head_outputs(
            hidden_RD,
            labels_R,
            temperature=temperature_R,
            is_entropy_needed=is_entropy_needed,
            candidate_ids_RK=to_device(np.concatenate([segment.candidate_ids for segment in segments]))
            if candidate_count
            else None,
            adapter=adapter,
        )
    named = {
        'logps_R': outputs.logps_R,
        'entropies_R': outputs.entropies_R,
        'candidate_logps_RK': outputs.candidate_logps_RK,
    }
    # Views of one split refuse in-place writes, so a loss cannot modify another adapter's rows.
    parts = {name: tensor.split(counts) for name, tensor in named.items() if tensor is not None}
    return [{name: tensors[index] for name, tensors in parts.items()} for index in range(len(segments))]


def _label_logps(
    model: PackedModel,
    hidden_RD: Tensor,
    labels_R: Tensor,
    temperature_R: Tensor,
    *,
    is_learned_R: npt.NDArray[np.bool_],
) -> Tensor:
    """Return float32 [R], the log-probability of each label, with a gradient for the learned labels only.

    In training, the head prepares the gradient of each row in its forward pass, at the cost of a second product with
    the model's largest matrix. Rows without a gradient are computed separately, without this product. The
    log-probabilities are bitwise the same, because the results of a row do not depend on the other rows.
    """
    if not torch.is_grad_enabled() or is_learned_R.all():
        return model.head_outputs(hidden_RD, labels_R, temperature=temperature_R).logps_R
    to_device = _copier(model)
    rows = [np.flatnonzero(is_learned_R), np.flatnonzero(~is_learned_R)]
    parts: list[Tensor] = []
    for is_learned, own in zip((True, False), map(to_device, rows), strict=True):
        with torch.set_grad_enabled(is_learned):
            outputs = model.head_outputs(_select_rows(hidden_RD, own), labels_R[own], temperature=temperature_R[own])
        parts.append(outputs.logps_R)
    return _select_rows(torch.cat(parts), to_device(np.argsort(np.concatenate(rows))))


def _other_outputs(model: PackedModel, segment: Segment, hidden_RD: Tensor, hidden_MD: Tensor) -> dict[str, Tensor]:
    """Return the outputs that are computed per segment."""
    outputs: dict[str, Tensor] = {}
    if segment.purpose.is_needed('logits'):
        raw_RV = model.logits(hidden_RD, adapters=_whole_span(segment, len(hidden_RD)))
        outputs['logits_RV'] = raw_RV / segment.purpose.options.temperature
    if segment.purpose.is_needed('values') and segment.purpose.state.value_head is not None:
        outputs['values_R'] = segment.purpose.state.value_head(hidden_RD)
    if segment.purpose.is_needed('embeddings'):
        rows_F = segment.tree.computed_T[segment.batch.last_rows_F]
        outputs['embeddings_FD'] = _select_rows(hidden_MD, _copier(model)(rows_F)).float()
    return outputs


def _segment_outputs(
    model: PackedModel, segment: Segment, hidden_RD: Tensor, outputs: dict[str, Tensor]
) -> SegmentOutputs:
    to_device, batch = _copier(model), segment.batch
    loss_batch = LossBatch(
        labels_R=to_device(batch.labels_R),
        weights_R=to_device(batch.weights_R),
        features_R=to_device(batch.features_R),
        streams={name: to_device(values) for name, values in batch.streams.items()},
        **outputs,
    )
    is_greedy_R = None
    if segment.purpose.is_needed('is_greedy'):
        is_greedy_R = _is_greedy(model, segment, hidden_RD, loss_batch.labels_R)
    return SegmentOutputs(loss_batch, is_greedy_R)


@torch.no_grad()
def _is_greedy(model: PackedModel, segment: Segment, hidden_RD: Tensor, labels_R: Tensor) -> Tensor:
    size = block_rows(hidden_RD.device)
    blocks = zip(hidden_RD.split(size), labels_R.split(size), strict=True)
    found = [
        model.logits(hidden, adapters=_whole_span(segment, len(hidden))).argmax(-1) == labels
        for hidden, labels in blocks
    ]
    return torch.cat(found)


def _whole_span(segment: Segment, row_count: int) -> list[AdapterSpan]:
    """Return a span of the segment's adapter over all given rows."""
    weights = None if segment.purpose.options.is_adapter_disabled else segment.purpose.state.weights
    return [AdapterSpan(0, row_count, weights)] if row_count else []


def _select_rows(hidden_ND: Tensor, rows_R: Tensor) -> Tensor:
    """Return [R, D], the given rows. A row may occur several times; its gradients are then added in a fixed order.

    On a CPU, only `index_select` guarantees this order, and on accelerators only indexing.
    """
    return hidden_ND.index_select(0, rows_R) if hidden_ND.device.type == 'cpu' else hidden_ND[rows_R]


def _copier(model: PackedModel) -> Callable[[npt.NDArray[Any]], Tensor]:
    def to_device(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(model.device)

    return to_device
