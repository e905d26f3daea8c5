"""Checks features and packs them into rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinkle.component import ComponentRegistry
from twinkle.data_format import IGNORE_INDEX, InputFeature
from twinkle.processor.errors import InvalidFeatures
from twinkle.processor.feature_arrays import FeatureArrays, FeatureReader
from twinkle.processor.packed_batch import STREAM_NAMES, PackedBatch


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """What a model takes."""

    vocab_size: int
    """Token ids and labels are below it."""
    max_tokens: int
    """Most tokens of one sequence."""


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
        if device_mesh is not None and getattr(device_mesh, 'world_size', 1) != 1:
            raise ValueError('device_mesh must have one device; several are not supported yet')
        if framework != 'transformers':
            raise ValueError(f"framework must be 'transformers', got {framework!r}")
        if padding_side not in ('left', 'right'):
            raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
        self.padding_free = padding_free

    def prepare(self, features: Sequence[InputFeature]) -> Sequence[InputFeature]:
        """Change features before they are checked and packed; here they are left as they are."""
        return features

    def __call__(
        self, features: Sequence[InputFeature], limits: InputLimits, *, ignore_index: int = IGNORE_INDEX
    ) -> PackedBatch:
        """Check and pack.

        Args:
            features: at least one; only read.
            limits: of the model.
            ignore_index: label that does not count, beside `IGNORE_INDEX`.

        Raises:
            InvalidFeatures: names the feature, the field and the cure.
        """
        features = self.prepare(features)
        if not features:
            raise InvalidFeatures('is empty; give at least one feature')
        readers = (
            FeatureReader(feature, index, limits.vocab_size, limits.max_tokens, ignore_index)
            for index, feature in enumerate(features)
        )
        return _pack([reader.read() for reader in readers])


PROCESSORS = ComponentRegistry('processor', InputProcessor, (InputProcessor,))
"""Processors by name."""


def _pack(features: list[FeatureArrays]) -> PackedBatch:
    counting = [np.flatnonzero((feature.labels_K != IGNORE_INDEX) & (feature.weights_K != 0)) for feature in features]
    begins = np.cumsum([0] + [len(feature.kept_K) for feature in features])
    names = _common_streams(features)
    pairs = list(zip(features, counting, strict=True))
    return PackedBatch(
        input_ids_T=np.concatenate([feature.input_ids_K for feature in features]),
        position_ids_T=np.concatenate([feature.position_ids_K for feature in features]),
        sequence_bounds=_bounds(features),
        feature_lengths=tuple(feature.length for feature in features),
        rows_R=np.concatenate([begins[index] + at for index, at in enumerate(counting)]),
        labels_R=np.concatenate([feature.labels_K[at] for feature, at in pairs]),
        weights_R=np.concatenate([feature.weights_K[at] for feature, at in pairs]),
        features_R=np.repeat(np.arange(len(features)), [len(at) for at in counting]),
        offsets_R=np.concatenate([feature.kept_K[at] for feature, at in pairs]),
        streams={name: np.concatenate([feature.streams[name][at] for feature, at in pairs]) for name in names},
    )


def _bounds(features: list[FeatureArrays]) -> tuple[tuple[int, int], ...]:
    bounds: list[tuple[int, int]] = []
    row = 0
    for feature in features:
        starts = [0, *(int(at) for at in np.flatnonzero(feature.position_ids_K[1:] == 0) + 1)]
        ends = [*starts[1:], len(feature.kept_K)]
        bounds += [(row + start, row + end) for start, end in zip(starts, ends, strict=True)]
        row += len(feature.kept_K)
    return tuple(bounds)


def _common_streams(features: list[FeatureArrays]) -> list[str]:
    names: list[str] = []
    for name in STREAM_NAMES:
        having = [name in feature.streams for feature in features]
        if any(having) and not all(having):
            raise InvalidFeatures(
                'is missing, though other features of the batch have it', index=having.index(False), field=name
            )
        if all(having):
            names.append(name)
    return names
