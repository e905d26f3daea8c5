"""Checks features and packs them into rows."""

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
from twinkle.processor.packed_batch import PackedBatch, PackedMedia, join_positions


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """What a model takes."""

    vocab_size: int
    """Token ids and labels are below it."""
    max_tokens: int
    """Most tokens of one sequence."""
    media: MediaSpec | None = None
    """How images and videos are read; None for a model that reads text alone."""


@remote_class()
class InputProcessor:
    """Turns features into one pack of rows. Subclass it to change features on their way in.

    Args:
        device_mesh: of one device; unset means the same.
        padding_free: batches are always packed, so padding never exists and either value gives the
            same results; kept because programs written for padded batches say it.
        framework: 'transformers'.
        padding_side: 'right' or 'left', without a difference for the same reason.

    Raises:
        ValueError: a value is not one of these.
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
        """Change features before they are checked and packed; here they are left as they are."""
        return features

    def __call__(
        self,
        features: Sequence[InputFeature],
        limits: InputLimits,
        *,
        ignore_index: int = IGNORE_INDEX,
        needs: FeatureNeeds | None = None,
    ) -> PackedBatch:
        """Check and pack.

        Args:
            features: at least one; only read.
            limits: of the model.
            ignore_index: label that does not count, beside `IGNORE_INDEX`; for a caller without `needs`.
            needs: what to pack the batch for. Unset: labels and every stream that `InputFeature` has.

        Raises:
            InvalidFeatures: names the feature, the field and the cure.
        """
        needs = FeatureNeeds(ignore_index=ignore_index) if needs is None else needs
        features = self.prepare(features)
        if not features:
            raise InvalidFeatures('is empty; give at least one feature')
        readers = (
            FeatureReader(feature, index, limits.vocab_size, limits.max_tokens, needs, limits.media)
            for index, feature in enumerate(features)
        )
        return _pack([reader.read() for reader in readers], needs)


PROCESSORS = ComponentRegistry('processor', InputProcessor, (InputProcessor,))
"""Processors by name."""


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
            _moved(media, int(begin)) for begin, one in zip(begins, features, strict=False) for media in one.media
        ),
    )


def _moved(media: PackedMedia, rows: int) -> PackedMedia:
    return replace(media, begin_row=media.begin_row + rows, end_row=media.end_row + rows)


def _bounds(features: list[FeatureArrays]) -> tuple[tuple[int, int], ...]:
    bounds: list[tuple[int, int]] = []
    row = 0
    for feature in features:
        # Examples with images are not joined into one, so that theirs never begin anew.
        restarts = np.flatnonzero(feature.position_ids_K[1:] == 0) + 1 if feature.position_ids_K.ndim == 1 else ()
        starts = [0, *(int(at) for at in restarts)]
        ends = [*starts[1:], len(feature.input_ids_K)]
        bounds += [(row + start, row + end) for start, end in zip(starts, ends, strict=True)]
        row += len(feature.input_ids_K)
    return tuple(bounds)


def _is_common(features: list[FeatureArrays], name: str) -> bool:
    """Return whether every feature carries a stream.

    Raises:
        InvalidFeatures: only some do, or they have different numbers of columns.
    """
    having = [name in feature.streams for feature in features]
    if not any(having):
        return False
    if not all(having):
        raise InvalidFeatures(
            'is missing, though other features of the batch have it', index=having.index(False), field=name
        )
    columns = [feature.streams[name].shape[1:] for feature in features]
    for index, own in enumerate(columns):
        if own != columns[0]:
            wanted = f'{columns[0][0]} columns' if columns[0] else 'one dimension'
            raise InvalidFeatures(f'must have {wanted}, as the first feature has', index=index, field=name)
    return True


def _gathered(features: list[FeatureArrays], name: str) -> npt.NDArray[Any]:
    """Return a stream at the counting labels: [R] or [R, K]. One copy of those rows, none of the others."""
    bounds = np.cumsum([0] + [len(feature.offsets_C) for feature in features])
    first = features[0].streams[name]
    result = np.empty((bounds[-1], *first.shape[1:]), first.dtype)
    for feature, (begin, end) in zip(features, pairwise(bounds), strict=True):
        np.take(feature.streams[name], feature.offsets_C, axis=0, out=result[begin:end], mode='clip')
    return result
