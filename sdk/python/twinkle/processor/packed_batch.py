"""A batch as flat rows without padding.

Legend: T tokens of all features, R rows whose label counts for the loss, F features, K columns of a wide stream,
P patches of an image or frames of a clip, C values per patch or frame.
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
    """One image, video or clip. Its tokens are the rows `[begin_row, end_row)`."""

    begin_row: int
    end_row: int
    kind: MediaKind
    patches_PC: Floats
    """float32 [P, C], as produced by the model's processor."""
    grid: Grid


@dataclass(frozen=True)
class PackedBatch:
    """Input of one adapter's forward pass."""

    input_ids_T: Ints
    position_ids_T: Ints
    """[T], or [3, T] for time, height and width if a feature has positions on three axes."""
    sequence_bounds: tuple[tuple[int, int], ...]
    """Rows `[begin, end)` of each sequence; attention does not cross these bounds."""
    feature_lengths: tuple[int, ...]
    """Number of tokens of each feature, including masked tokens."""
    last_rows_F: Ints
    """Row of each feature's last token in the pack."""
    rows_R: Ints
    """Row in the pack that predicts each counted label."""
    labels_R: Ints
    weights_R: Floats
    """Factor of each label's loss; 0 only if labels of weight 0 were requested."""
    features_R: Ints
    """Index of each label's feature, ascending."""
    offsets_R: Ints
    """Index of each label in its feature."""
    streams: Mapping[str, Floats | Ints]
    """Requested streams that every feature has: float32 [R] or [R, K], or int64 for token ids."""
    media: tuple[PackedMedia, ...] = ()
    """Images, videos and clips of all features, in the order of their rows."""
    routed_experts_TLA: Ints | None = None
    """Experts of each token in each layer of a mixture; -1 where the router chooses. None: routers choose all."""

    @property
    def token_count(self) -> int:
        """Number of rows."""
        return len(self.input_ids_T)

    @property
    def label_count(self) -> int:
        """Number of counted labels."""
        return len(self.labels_R)

    def by_feature(self, values_R: npt.NDArray[Any]) -> list[Floats]:
        """Return the values of each feature at its counted labels, 0.0 elsewhere: float32 [length] or [length, K]."""
        bounds = np.searchsorted(self.features_R, np.arange(len(self.feature_lengths) + 1))
        results: list[Floats] = []
        for length, begin, end in zip(self.feature_lengths, bounds[:-1], bounds[1:], strict=True):
            values = np.zeros((length, *values_R.shape[1:]), np.float32)
            values[self.offsets_R[begin:end]] = values_R[begin:end]
            results.append(values)
        return results

    def gather(self, values: 'list[npt.NDArray[Any]]') -> Floats:
        """Return float32 [R] from one array [length] per feature: the inverse of `by_feature`."""
        bounds = np.searchsorted(self.features_R, np.arange(len(values) + 1))
        result = np.empty(self.label_count, np.float32)
        for own, begin, end in zip(values, bounds[:-1], bounds[1:], strict=True):
            result[begin:end] = np.asarray(own)[self.offsets_R[begin:end]]
        return result


def join_positions(positions: Sequence[Ints]) -> Ints:
    """Return [T], or [3, T] if a feature has three axes; text has the same position on every axis."""
    if all(own.ndim == 1 for own in positions):
        return np.concatenate(positions)
    return np.concatenate([np.broadcast_to(own, (3, own.shape[-1])) for own in positions], axis=1)
