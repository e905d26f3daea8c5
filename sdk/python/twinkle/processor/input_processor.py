"""Validation of features and their packing into rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.component import ComponentRegistry
from twinkle.data_format import IGNORE_INDEX, InputFeature, MediaSpec
from twinkle.infra import refuse_many_ranks, remote_class
from twinkle.processor.errors import InvalidFeatures
from twinkle.processor.feature_arrays import FeatureArrays, FeatureReader
from twinkle.processor.needs import FeatureNeeds
from twinkle.processor.packed_batch import Ints, PackedBatch, PackedMedia, join_positions


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """Limits of a model's inputs."""

    vocab_size: int
    """Exclusive limit of token ids and labels."""
    max_tokens: int
    """Maximum number of tokens of a sequence."""
    media: MediaSpec | None = None
    """Media specification of the model; None for a text model."""
    routing: tuple[int, int, int] | None = None
    """Numbers of layers with experts, experts per token and experts per layer; None if `routed_experts` are not
    supported."""


@remote_class()
class InputProcessor:
    """Packs features into one batch of rows. Subclasses may change features before packing.

    Args:
        device_mesh: mesh of one rank, or None.
        padding_free: no effect; batches are always packed. Accepted for programs written for padded batches.
        framework: must be 'transformers'.
        padding_side: 'right' or 'left'; no effect, because packed batches have no padding.

    Raises:
        ValueError: an argument has an unsupported value.
        NotSupportedYet: the mesh has several ranks.
    """

    def __init__(
        self,
        device_mesh: Any = None,
        *,
        padding_free: bool = False,
        framework: str = 'transformers',
        padding_side: str = 'right',
    ) -> None:
        refuse_many_ranks(device_mesh)
        if framework != 'transformers':
            raise ValueError(f"framework must be 'transformers', got {framework!r}")
        if padding_side not in ('left', 'right'):
            raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
        self.padding_free = padding_free

    def prepare(self, features: Sequence[InputFeature]) -> Sequence[InputFeature]:
        """Return the features to validate and pack. Subclasses may change them; by default they are unchanged."""
        return features

    def __call__(
        self,
        features: Sequence[InputFeature],
        limits: InputLimits,
        *,
        ignore_index: int = IGNORE_INDEX,
        needs: FeatureNeeds | None = None,
    ) -> PackedBatch:
        """Validate and pack features.

        Args:
            features: at least one feature; not modified.
            limits: limits of the model.
            ignore_index: label to ignore, in addition to `IGNORE_INDEX`; used only without `needs`.
            needs: labels and streams to pack. None packs labels and every stream of `InputFeature`.

        Raises:
            InvalidFeatures: there are no features, or a feature is invalid; the error names the feature and the field.
        """
        needs = FeatureNeeds(ignore_index=ignore_index) if needs is None else needs
        features = self.prepare(features)
        if not features:
            raise InvalidFeatures('must contain at least one feature')
        readers = (
            FeatureReader(feature, index, limits.vocab_size, limits.max_tokens, needs, limits.media, limits.routing)
            for index, feature in enumerate(features)
        )
        arrays = [reader.read() for reader in readers]
        batch = _pack(arrays, needs)
        return batch if limits.routing is None else replace(batch, routed_experts_TLA=_joined_routing(arrays))


PROCESSORS = ComponentRegistry('processor', InputProcessor, (InputProcessor,))
"""Registered processors by name."""


def _pack(features: list[FeatureArrays], needs: FeatureNeeds) -> PackedBatch:
    begins = np.cumsum([0] + [len(feature.input_ids_K) for feature in features])
    counts = [len(feature.counting_C) for feature in features]
    return PackedBatch(
        input_ids_T=np.concatenate([feature.input_ids_K for feature in features]),
        position_ids_T=join_positions([feature.position_ids_K for feature in features]),
        sequence_bounds=_bounds(features),
        feature_lengths=tuple(feature.length for feature in features),
        last_rows_F=begins[1:] - 1,
        rows_R=np.concatenate([begin + feature.counting_C for begin, feature in zip(begins, features, strict=False)]),
        labels_R=np.concatenate([feature.labels_C for feature in features]),
        weights_R=np.concatenate([feature.weights_C for feature in features]),
        features_R=np.repeat(np.arange(len(features)), counts),
        offsets_R=np.concatenate([feature.offsets_C for feature in features]),
        streams={name: _gathered(features, name) for name in needs.streams if _is_common(features, name)},
        media=tuple(
            _shifted(media, int(begin)) for begin, one in zip(begins, features, strict=False) for media in one.media
        ),
    )


def _joined_routing(features: list[FeatureArrays]) -> Ints | None:
    """Return int64 [T, L, A] with -1 for the features without experts, or None if no feature has them."""
    given = next((feature.routed_experts_KLA for feature in features if feature.routed_experts_KLA is not None), None)
    if given is None:
        return None
    return np.concatenate(
        [
            np.full((len(feature.input_ids_K), *given.shape[1:]), -1)
            if feature.routed_experts_KLA is None
            else feature.routed_experts_KLA
            for feature in features
        ]
    )


def _shifted(media: PackedMedia, rows: int) -> PackedMedia:
    return replace(media, begin_row=media.begin_row + rows, end_row=media.end_row + rows)


def _bounds(features: list[FeatureArrays]) -> tuple[tuple[int, int], ...]:
    bounds: list[tuple[int, int]] = []
    row = 0
    for feature in features:
        # A feature with images is always one sequence, so only flat positions are searched for restarts.
        restarts = np.flatnonzero(feature.position_ids_K[1:] == 0) + 1 if feature.position_ids_K.ndim == 1 else ()
        starts = [0, *(int(at) for at in restarts)]
        ends = [*starts[1:], len(feature.input_ids_K)]
        bounds += [(row + start, row + end) for start, end in zip(starts, ends, strict=True)]
        row += len(feature.input_ids_K)
    return tuple(bounds)


def _is_common(features: list[FeatureArrays], name: str) -> bool:
    """Return whether every feature has a stream.

    Raises:
        InvalidFeatures: only some features have the stream, or the features differ in its number of columns.
    """
    has_stream = [name in feature.streams for feature in features]
    if not any(has_stream):
        return False
    if not all(has_stream):
        raise InvalidFeatures(
            'is missing, though other features of the batch have it', index=has_stream.index(False), field=name
        )
    columns = [feature.streams[name].shape[1:] for feature in features]
    for index, own in enumerate(columns):
        if own != columns[0]:
            wanted = f'{columns[0][0]} columns' if columns[0] else 'one dimension'
            raise InvalidFeatures(f'must have {wanted} like the first feature', index=index, field=name)
    return True


def _gathered(features: list[FeatureArrays], name: str) -> npt.NDArray[Any]:
    """Return a stream at the counted labels, [R] or [R, K]; only those rows are copied."""
    bounds = np.cumsum([0] + [len(feature.offsets_C) for feature in features])
    first = features[0].streams[name]
    result = np.empty((bounds[-1], *first.shape[1:]), first.dtype)
    for feature, (begin, end) in zip(features, pairwise(bounds), strict=True):
        np.take(feature.streams[name], feature.offsets_C, axis=0, out=result[begin:end], mode='clip')
    return result
