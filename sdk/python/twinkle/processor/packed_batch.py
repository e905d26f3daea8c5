"""A batch as flat rows, without padding.

Legend: T tokens of all features, R rows whose label counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

STREAM_NAMES = ('advantages', 'old_logps', 'ref_logps')
"""Per-token numbers that a feature may carry for its loss."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PackedBatch:
    """What one forward pass of one adapter runs on."""

    input_ids_T: Ints
    position_ids_T: Ints
    sequence_bounds: tuple[tuple[int, int], ...]
    """Rows `[begin, end)` of each sequence; attention does not cross them."""
    feature_lengths: tuple[int, ...]
    """Tokens of each feature as it was given, masked ones included."""
    rows_R: Ints
    """Row of the pack at which each counting label is predicted."""
    labels_R: Ints
    weights_R: Floats
    """Factor of each label's loss, never 0."""
    features_R: Ints
    """Index of the feature each label belongs to, rising."""
    offsets_R: Ints
    """Index of each label within its feature."""
    streams: Mapping[str, Floats]
    """Of `STREAM_NAMES`, those that every feature carries: float32 [R]."""

    @property
    def token_count(self) -> int:
        """Rows computed."""
        return len(self.input_ids_T)

    @property
    def label_count(self) -> int:
        """Labels that count."""
        return len(self.labels_R)

    def by_feature(self, values_R: npt.NDArray[Any]) -> list[Floats]:
        """Return float32 [T] for each feature: the values at its counting labels, 0.0 elsewhere."""
        results: list[Floats] = []
        for index, length in enumerate(self.feature_lengths):
            begin, end = np.searchsorted(self.features_R, (index, index + 1))
            values = np.zeros(length, np.float32)
            values[self.offsets_R[begin:end]] = values_R[begin:end]
            results.append(values)
        return results

    def gather(self, values: 'list[npt.NDArray[Any]]') -> Floats:
        """Return float32 [R] from one array [T] for each feature: the inverse of `by_feature`."""
        pairs = zip(self.features_R, self.offsets_R, strict=True)
        return np.array([values[feature][offset] for feature, offset in pairs], np.float32)
