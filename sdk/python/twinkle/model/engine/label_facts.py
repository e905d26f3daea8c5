"""Results of a batch per label, for metrics, without the autograd graph."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from twinkle.loss import Loss
from twinkle.metric import LabelFacts
from twinkle.model.engine.adapter_state import SegmentOutputs
from twinkle.processor import PackedBatch

_OPTIONAL = ('entropies_R', 'is_greedy_R', 'values_R', 'embeddings_FD')
"""Fields of `LabelFacts` that may be None."""


def label_facts(batch: PackedBatch, outputs: SegmentOutputs) -> LabelFacts:
    """Return the per-label results of one pass."""
    own = outputs.loss_batch
    return LabelFacts(
        logps_R=own.logps_R.numpy(force=True),
        features_R=batch.features_R,
        streams=batch.streams,
        entropies_R=_plain(own.entropies_R),
        is_greedy_R=_plain(outputs.is_greedy_R),
        values_R=_plain(own.values_R),
        embeddings_FD=_plain(own.embeddings_FD),
    )


def more_outputs(names: Sequence[str], outputs: SegmentOutputs) -> dict[str, npt.NDArray[Any]]:
    """Return the requested outputs: one entry per label, per feature for embeddings, or per token for experts."""
    own = outputs.loss_batch
    available = {
        'embeddings': own.embeddings_FD, 'entropies': own.entropies_R, 'logits': own.logits_RV, 'values': own.values_R,
        'routed_experts': outputs.routed_experts_TLA,
    }  # fmt: skip
    return {name: _plain(available[name]) for name in names}


def target_logps(loss: Loss, outputs: SegmentOutputs) -> npt.NDArray[np.float32]:
    """Return the log-probabilities to report for a batch: [R], or [R, K] if candidates replace the label."""
    own = outputs.loss_batch
    candidates_RK = own.candidate_logps_RK if loss.are_candidates_targets else None
    return (own.logps_R if candidates_RK is None else candidates_RK).numpy(force=True)


def by_feature(name: str, batch: PackedBatch, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Return an output as one array per feature."""
    if name == 'routed_experts':
        return np.split(values, batch.last_rows_F[:-1] + 1)
    return list(values) if name == 'embeddings' else batch.by_feature(values)


def joined_facts(parts: Sequence[LabelFacts], feature_counts: Sequence[int]) -> LabelFacts:
    """Return the results of a batch that ran in several passes.

    Args:
        parts: results of the parts, in the order of the features; at least one.
        feature_counts: number of features of each part.
    """
    if len(parts) == 1:
        return parts[0]
    begins = np.cumsum([0, *feature_counts[:-1]])
    return LabelFacts(
        logps_R=_joined(parts, lambda part: part.logps_R),
        features_R=np.concatenate([part.features_R + begin for part, begin in zip(parts, begins, strict=True)]),
        streams={name: _joined(parts, lambda part, name=name: part.streams[name]) for name in parts[0].streams},
        **{name: _joined(parts, lambda part, name=name: getattr(part, name)) for name in _OPTIONAL},
    )


def _joined(parts: Sequence[LabelFacts], read: Callable[[LabelFacts], Any]) -> npt.NDArray[Any] | None:
    arrays = [read(part) for part in parts]
    return None if any(array is None for array in arrays) else np.concatenate(arrays)


def _plain(tensor: Tensor | None) -> npt.NDArray[Any] | None:
    return None if tensor is None else tensor.numpy(force=True)
