"""One forward pass over rows of several adapters, and what their losses read of it.

Legend: T rows of the pass, R rows of one adapter whose label counts, F its features, D hidden size,
V vocabulary, K candidates of a label.

Every number that a loss sees is computed row by row or from its own adapter's rows alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinkle.loss import LossBatch
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.results import ForwardOptions
from twinkle.nn import AdapterSpan, PackedCausalLM, SequenceSpan
from twinkle.processor import PackedBatch


@dataclass(frozen=True)
class Segment:
    """What one adapter brings to a pass."""

    state: AdapterState
    batch: PackedBatch
    options: ForwardOptions

    def is_needed(self, output: str) -> bool:
        """Whether the adapter's loss reads that output."""
        return output in self.state.loss.required_outputs

    @property
    def candidate_ids(self) -> npt.NDArray[np.int64] | None:
        """The ids whose log-probabilities the loss reads beside the labels'."""
        if not self.is_needed('candidate_logps'):
            return None
        return self.batch.streams[self.state.loss.candidate_stream].astype(np.int64)

    @property
    def head_needs(self) -> tuple[bool, int]:
        """What the output head must give: whether entropies, and how many candidates of each label."""
        ids_RK = self.candidate_ids
        return self.is_needed('entropies'), 0 if ids_RK is None else ids_RK.shape[1]


def forward_outputs(model: PackedCausalLM, segments: Sequence[Segment], *, is_training: bool) -> list[LossBatch]:
    """Run a pass and return, for each segment, what its loss may read. Gradients as torch's mode says."""
    hidden_TD = _hidden(model, segments, is_training=is_training)
    mover = _mover(model)
    begins = [0, *accumulate(segment.batch.token_count for segment in segments)]
    rows = [segment.batch.rows_R + begin for segment, begin in zip(segments, begins[:-1], strict=True)]
    hiddens = hidden_TD[mover(np.concatenate(rows))].split([len(own) for own in rows])
    results: list[LossBatch | None] = [None] * len(segments)
    order = sorted(range(len(segments)), key=lambda index: segments[index].head_needs)
    # Rows whose head gives the same outputs share it: the largest matrix of the model is read once.
    for _, group in groupby(order, key=lambda index: segments[index].head_needs):
        indexes = list(group)
        heads = _head_outputs(model, [segments[index] for index in indexes], [hiddens[index] for index in indexes])
        for index, head in zip(indexes, heads, strict=True):
            rest = _other_outputs(model, segments[index], hiddens[index], hidden_TD[begins[index] : begins[index + 1]])
            results[index] = _loss_batch(segments[index].batch, mover, {**head, **rest})
    return [result for result in results if result is not None]


def _hidden(model: PackedCausalLM, segments: Sequence[Segment], *, is_training: bool) -> Tensor:
    mover = _mover(model)
    sequences: list[SequenceSpan] = []
    adapters: list[AdapterSpan] = []
    row = 0
    for segment in segments:
        sequences += [SequenceSpan(row + begin, row + end) for begin, end in segment.batch.sequence_bounds]
        weights = None if segment.options.is_adapter_disabled else segment.state.weights
        adapters.append(AdapterSpan(row, row + segment.batch.token_count, weights))
        row += segment.batch.token_count
    return model.hidden(
        mover(np.concatenate([segment.batch.input_ids_T for segment in segments])),
        mover(np.concatenate([segment.batch.position_ids_T for segment in segments])),
        sequences=sequences,
        adapters=adapters,
        is_training=is_training,
    )


def _head_outputs(
    model: PackedCausalLM, segments: Sequence[Segment], hiddens: Sequence[Tensor]
) -> list[dict[str, Tensor]]:
    """Return the head's outputs for segments with the same needs."""
    mover = _mover(model)
    counts = [segment.batch.label_count for segment in segments]
    temperatures = np.repeat(np.array([segment.options.temperature for segment in segments], np.float32), counts)
    is_entropy_needed, candidate_count = segments[0].head_needs
    logps = [
        model.label_logprobs(hidden, mover(segment.batch.labels_R), temperature=segment.options.temperature)
        for hidden, segment in zip(hiddens, segments, strict=True)
    ]
    named = {'logps_R': torch.cat(logps)}
    # Views of one split refuse to be written to, so no loss can reach another's rows.
    parts = {name: tensor.split(counts) for name, tensor in named.items() if tensor is not None}
    return [{name: tensors[index] for name, tensors in parts.items()} for index in range(len(segments))]


def _other_outputs(model: PackedCausalLM, segment: Segment, hidden_RD: Tensor, hidden_TD: Tensor) -> dict[str, Tensor]:
    """Return the outputs that are computed from the segment's own rows."""
    outputs: dict[str, Tensor] = {}
    if segment.is_needed('logits'):
        outputs['logits_RV'] = model.logits(hidden_RD) / segment.options.temperature
    if segment.is_needed('values'):
        outputs['values_R'] = segment.state.value_head(hidden_RD)
    if segment.is_needed('embeddings'):
        outputs['embeddings_FD'] = hidden_TD[_mover(model)(segment.batch.last_rows_F)].float()
    return outputs


def _loss_batch(
    batch: PackedBatch, mover: Callable[[npt.NDArray[Any]], Tensor], outputs: dict[str, Tensor]
) -> LossBatch:
    return LossBatch(
        labels_R=mover(batch.labels_R),
        weights_R=mover(batch.weights_R),
        features_R=mover(batch.features_R),
        streams={name: mover(values) for name, values in batch.streams.items()},
        **outputs,
    )


def _mover(model: PackedCausalLM) -> Callable[[npt.NDArray[Any]], Tensor]:
    def to_device(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(model.device)

    return to_device
