"""Validation of the images, videos and audio of one feature against its tokens.

Legend: K kept tokens of the feature, P patches of an image or frames of a clip, C values per patch or frame, N images
or clips, M mel bands, F frames of every clip.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import Grid, InputFeature, MediaKind, MediaSpec
from twinkle.processor.packed_batch import Ints, PackedMedia

_NAMES: dict[MediaKind, tuple[str, str]] = {
    'image': ('pixel_values', 'image_grid_thw'),
    'video': ('pixel_values_videos', 'video_grid_thw'),
    'audio': ('input_features', 'feature_attention_mask'),
}
"""Field with the contents and field with the sizes, by kind of media."""
MEDIA_NAMES = (*_NAMES['image'], *_NAMES['video'], 'second_per_grid_ts', *_NAMES['audio'])
"""Fields of a feature that text models do not support."""
_MIN_FRAMES = 3
"""Minimum number of frames of a clip; fewer frames give no token."""
ErrorFactory = Callable[[str, str], Exception]
"""Factory of the error about a field: `error(field, problem)`."""


@dataclass(frozen=True)
class MediaFields:
    """Reader of the media of one feature.

    Args:
        feature: feature to read.
        spec: media specification of the model; None for a text model.
        error: creates errors that name the feature.
    """

    feature: InputFeature
    spec: MediaSpec | None
    error: ErrorFactory

    def read(self, input_ids_K: Ints, is_produced_K: npt.NDArray[np.bool_]) -> tuple[PackedMedia, ...]:
        """Return the images, videos and clips in the order of their rows.

        Args:
            input_ids_K: kept tokens.
            is_produced_K: whether each token is also a label. After the media tokens that the grids require, further
                media tokens are accepted as text if the model produced them.

        Raises:
            InvalidFeatures: the model does not support a kind of media, or tokens, grids and patches are inconsistent.
        """
        kinds = () if self.spec is None else self.spec.kinds
        read = {name for kind in kinds for name in _NAMES[kind]}
        if 'video' in kinds:
            read.add('second_per_grid_ts')
        unread = [name for name in MEDIA_NAMES if self.feature.get(name) is not None and name not in read]
        if unread:
            reads = ', '.join(('text', *kinds))
            raise self.error(unread[0], f'is given, but the model reads only {reads}; leave it out')
        found = [
            media
            for kind in kinds
            for media in self._of_kind(kind, np.flatnonzero(input_ids_K == self.spec.token_id(kind)), is_produced_K)
        ]
        positions = self._array('position_ids') if found and self.spec.has_axes else np.empty((3, 0))
        if positions is None or positions.ndim != 2:
            problem = 'must have shape [3, tokens] with images; use Template.set_mm_position_ids'
            raise self.error('position_ids', problem)
        return tuple(sorted(found, key=lambda media: media.begin_row))

    def _of_kind(self, kind: MediaKind, rows: Ints, is_produced_K: npt.NDArray[np.bool_]) -> list[PackedMedia]:
        name, grid_name = _NAMES[kind]
        grids = self._clips(grid_name) if kind == 'audio' else self._grids(grid_name)
        sizes = [grid[1] if kind == 'audio' else int(np.prod(grid)) for grid in grids]
        if kind == 'video':
            self._check_seconds(len(grids))
        counts = [self.spec.token_count(grid) for grid in grids]
        extra = rows[sum(counts) :]
        if len(rows) < sum(counts) or not is_produced_K[extra].all():
            raise self.error(
                'input_ids', f'must contain {sum(counts)} tokens for the {kind}s of {grid_name}, got {len(rows)}'
            )
        patches_PC = self._frames(name, len(grids)) if kind == 'audio' else self._patches(name, sum(sizes))
        media: list[PackedMedia] = []
        for grid, count, size in zip(grids, counts, sizes, strict=True):
            own, rows = rows[:count], rows[count:]
            if own[-1] - own[0] != count - 1:
                raise self.error('input_ids', f'must contain the {count} tokens of each {kind} consecutively')
            media.append(PackedMedia(int(own[0]), int(own[-1]) + 1, kind, patches_PC[:size], grid))
            patches_PC = patches_PC[size:]
        return media

    def _grids(self, name: str) -> list[Grid]:
        given = self._array(name)
        if given is None:
            return []
        if given.ndim != 2 or given.shape[1] != 3 or given.dtype.kind not in 'iu':
            raise self.error(name, f'must be integers in 3 columns, got {given.dtype} of shape {list(given.shape)}')
        side = self.spec.merge_size
        if given.size and ((given < 1).any() or (given > 2**15).any() or (given[:, 1:] % side).any()):
            raise self.error(name, f'must be from 1 to {2**15}, with rows and columns that are multiples of {side}')
        return [(int(frames), int(rows), int(columns)) for frames, rows, columns in given]

    def _check_seconds(self, videos: int) -> None:
        """Validate the seconds per grid. They are not used otherwise, because the positions already include them."""
        name = 'second_per_grid_ts'
        given = self._array(name)
        if given is None:
            return
        if given.shape != (videos,) or given.dtype.kind not in 'iuf' or not (np.isfinite(given) & (given > 0)).all():
            raise self.error(name, f'must be {videos} positive numbers, got {given.dtype} of shape {list(given.shape)}')

    def _clips(self, name: str) -> list[Grid]:
        """Return the grid of each clip: its audible frames, all frames, and 1."""
        given, count = self._array(name), self.spec.frame_count
        if given is None:
            return []
        if given.ndim != 2 or given.shape[1] != count or given.dtype.kind not in 'iub':
            problem = f'must be integers in {count} columns, got {given.dtype} of shape {list(given.shape)}'
            raise self.error(name, problem)
        audible = given.astype(np.int64).sum(axis=1)
        if (given != (np.arange(count) < audible[:, None])).any() or (audible < _MIN_FRAMES).any():
            raise self.error(name, f'must have at least {_MIN_FRAMES} ones in each clip, followed only by zeros')
        return [(int(own), count, 1) for own in audible]

    def _frames(self, name: str, clips: int) -> npt.NDArray[np.float32]:
        """Return the frames of all clips, [N F, M], from [N, M, F]."""
        given, shape = self._array(name), (clips, self.spec.patch_width, self.spec.frame_count)
        if given is None and not clips:
            return np.empty((0, shape[1]), np.float32)
        if given is None or given.shape != shape or given.dtype.kind not in 'iuf':
            found = 'nothing' if given is None else f'{given.dtype} of shape {list(given.shape)}'
            raise self.error(name, f'must be numbers of shape {list(shape)}, got {found}')
        frames = np.ascontiguousarray(given.transpose(0, 2, 1), np.float32).reshape(-1, shape[1])
        if not np.isfinite(frames).all():
            raise self.error(name, 'must be finite')
        return frames

    def _patches(self, name: str, count: int) -> npt.NDArray[np.float32]:
        given = self._array(name)
        width = self.spec.patch_width
        if given is None:
            if count:
                raise self.error(name, f'is missing; give {count} patches of {width} numbers')
            return np.empty((0, width), np.float32)
        if given.shape != (count, width) or given.dtype.kind not in 'iuf':
            found = f'{given.dtype} of shape {list(given.shape)}'
            raise self.error(name, f'must be numbers of shape {[count, width]}, got {found}')
        patches = np.ascontiguousarray(given, np.float32)
        if not np.isfinite(patches).all():
            raise self.error(name, 'must be finite')
        return patches

    def _array(self, name: str) -> npt.NDArray[Any] | None:
        given: Any = self.feature.get(name)
        try:
            return None if given is None else np.asarray(given)
        except (ValueError, RuntimeError, TypeError):
            raise self.error(name, 'must be an array of numbers with rows of equal length') from None
