"""Where the tokens of images and videos stand: positions in time, height and width.

Qwen2-VL, arXiv:2409.12191, section 2.1, with Qwen2.5-VL's time in seconds, arXiv:2502.13923, section 2.1.3. T tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twinkle.data_format import Grid, MediaKind, VisionSpec


def media_positions(
    input_ids: npt.ArrayLike,
    spec: VisionSpec,
    *,
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    seconds: Sequence[float] = (),
) -> npt.NDArray[np.int32]:
    """Return int32 [3, T]: text counts on from the furthest axis, an image spreads over rows and columns.

    Args:
        input_ids: with as many tokens for each image and video as it has.
        spec: of the model.
        image_grids: patches of each image, in order.
        video_grids: patches of each video, in order.
        seconds: that one step of each video's time takes. Empty: 1.0.

    Raises:
        ValueError: the tokens are not those of the media.
    """
    ids = np.asarray(input_ids)
    times = list(seconds) or [1.0] * len(video_grids)
    waiting: dict[MediaKind, list[tuple[Grid, float]]] = {
        'image': [(grid, 1.0) for grid in image_grids],
        'video': [(grid, spec.tokens_per_second * time) for grid, time in zip(video_grids, times, strict=True)],
    }
    positions = np.zeros((3, len(ids)), np.int64)
    begin = next_position = 0
    for row in np.flatnonzero((ids == spec.image_token_id) | (ids == spec.video_token_id)):
        if row < begin:
            continue
        kind: MediaKind = 'image' if ids[row] == spec.image_token_id else 'video'
        if not waiting[kind]:
            raise ValueError(f'input_ids show more {kind}s than are given')
        grid, interval = waiting[kind].pop(0)
        positions[:, begin:row] = np.arange(next_position, next_position + row - begin)
        next_position += int(row) - begin
        begin = int(row) + spec.token_count(grid)
        if begin > len(ids) or (ids[row:begin] != spec.token_id(kind)).any():
            raise ValueError(f'input_ids must hold {spec.token_count(grid)} tokens side by side for a {kind} of {grid}')
        positions[:, row:begin] = next_position + _spread(grid, spec.merge_size, interval)
        next_position += max(grid[1], grid[2]) // spec.merge_size
    if any(waiting.values()):
        raise ValueError('input_ids show fewer images or videos than are given')
    positions[:, begin:] = np.arange(next_position, next_position + len(ids) - begin)
    if positions.max(initial=0) > np.iinfo(np.int32).max:
        raise ValueError('input_ids would stand beyond positions of 32 bits; give shorter videos')
    return positions.astype(np.int32)


def _spread(grid: Grid, merge_size: int, interval: float) -> npt.NDArray[np.int64]:
    """Return int64 [3, N] from 0: time, row and column of each token, columns running fastest."""
    axes = np.indices((grid[0], grid[1] // merge_size, grid[2] // merge_size)).reshape(3, -1)
    # Seconds are multiplied as float32 and cut off to whole positions, as transformers does.
    axes[0] = (axes[0].astype(np.float32) * np.float32(interval)).astype(np.int64)
    return axes
