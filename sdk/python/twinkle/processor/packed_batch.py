"""A batch as flat rows, without padding.

Legend: T tokens of all features, R rows whose label counts, F features, K columns of a wide stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import Grid, MediaKind

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PackedMedia:
    """Rows `[begin_row, end_row)` are the tokens of one image or video."""

    begin_row: int
    end_row: int
    kind: MediaKind
    patches_PC: Floats
    """Its patches, as the model's image processor makes them."""
    grid: Grid


@dataclass(frozen=True)
class PackedBatch:
    """What one forward pass of one adapter runs on."""

    input_ids_T: Ints
    position_ids_T: Ints
    """[T], or [3, T] where a feature has images: time, height and width."""
    sequence_bounds: tuple[tuple[int, int], ...]
    """Rows `[begin, end)` of each sequence; attention does not cross them."""
    feature_lengths: tuple[int, ...]
    """Tokens of each feature as it was given, masked ones included."""
    last_rows_F: Ints
    """Row of the pack that holds each feature's last token."""
    rows_R: Ints
    """Row of the pack at which each counting label is predicted."""
    labels_R: Ints
    weights_R: Floats
    """Factor of each label's loss; 0 only where such labels were asked for."""
    features_R: Ints
    """Index of the feature each label belongs to, rising."""
    offsets_R: Ints
    """Index of each label within its feature."""
    streams: Mapping[str, Floats | Ints]
    """Those asked for that every feature carries: float32 [R] or [R, K], or int64 if they are token ids."""
    media: tuple[PackedMedia, ...] = ()
    """Images and videos of all features, in the order of their rows."""

    @property
    def token_count(self) -> int:
        """Rows computed."""
        return len(self.input_ids_T)

    @property
    def label_count(self) -> int:
        """Labels that count."""
        return len(self.labels_R)

    def by_feature(self, values_R: npt.NDArray[Any]) -> list[Floats]:
        """Return float32 [T], or [T, K] of wide values, for each feature: values at counting labels, 0.0 elsewhere."""
        bounds = np.searchsorted(self.features_R, np.arange(len(self.feature_lengths) + 1))
        results: list[Floats] = []
        for length, begin, end in zip(self.feature_lengths, bounds[:-1], bounds[1:], strict=True):
            values = np.zeros((length, *values_R.shape[1:]), np.float32)
            values[self.offsets_R[begin:end]] = values_R[begin:end]
            results.append(values)
        return results

    def gather(self, values: 'list[npt.NDArray[Any]]') -> Floats:
        """Return float32 [R] from one array [T] for each feature: the inverse of `by_feature`."""
        bounds = np.searchsorted(self.features_R, np.arange(len(values) + 1))
        result = np.empty(self.label_count, np.float32)
        for own, begin, end in zip(values, bounds[:-1], bounds[1:], strict=True):
            result[begin:end] = np.asarray(own)[self.offsets_R[begin:end]]
        return result


def join_positions(positions: Sequence[Ints]) -> Ints:
    """Return [T] of runs [t], or [3, T] where a run has three axes; text is at the same place on each."""
    if all(own.ndim == 1 for own in positions):
        return np.concatenate(positions)
    return np.concatenate([np.broadcast_to(own, (3, own.shape[-1])) for own in positions], axis=1)
