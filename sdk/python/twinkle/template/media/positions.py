"""Position ids in time, height and width for the tokens of images and videos.

The positions follow Qwen2-VL (arXiv:2409.12191, section 2.1), with Qwen2.5-VL's time in seconds (arXiv:2502.13923,
section 2.1.3). T is the number of tokens.
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
    """Return the position ids int32 [3, T] of a sequence with images and videos.

    The tokens of an image are positioned by their row and column. Text after an item continues at the item's first
    position plus its longer side in tokens, even if a video has larger time positions. This agrees with transformers.

    Args:
        input_ids: integers [T], in which each media token is already repeated for its item.
        spec: vision settings of the model.
        image_grids: patches (time, height, width) of each image, in order.
        video_grids: patches (time, height, width) of each video, in order.
        seconds: duration of one temporal step of each video in seconds. Empty: 1.0 for all.

    Raises:
        ValueError: the media tokens do not match the grids, the number of `seconds` is wrong, or a position exceeds 32
            bits.
    """
    ids = np.asarray(input_ids)
    times = list(seconds) or [1.0] * len(video_grids)
    remaining: dict[MediaKind, list[tuple[Grid, float]]] = {
        'image': [(grid, 1.0) for grid in image_grids],
        'video': [(grid, spec.tokens_per_second * time) for grid, time in zip(video_grids, times, strict=True)],
    }
    positions = np.zeros((3, len(ids)), np.int64)
    begin = next_position = 0
    for row in np.flatnonzero((ids == spec.image_token_id) | (ids == spec.video_token_id)):
        if row < begin:
            continue
        kind: MediaKind = 'image' if ids[row] == spec.image_token_id else 'video'
        if not remaining[kind]:
            raise ValueError(f'input_ids contain more {kind}s than are given')
        grid, interval = remaining[kind].pop(0)
        positions[:, begin:row] = np.arange(next_position, next_position + row - begin)
        next_position += int(row) - begin
        begin = int(row) + spec.token_count(grid)
        if begin > len(ids) or (ids[row:begin] != spec.token_id(kind)).any():
            raise ValueError(
                f'input_ids must contain {spec.token_count(grid)} consecutive tokens for a {kind} of {grid} patches'
            )
        positions[:, row:begin] = next_position + _grid_positions(grid, spec.merge_size, interval)
        next_position += max(grid[1], grid[2]) // spec.merge_size
    if any(remaining.values()):
        raise ValueError('input_ids contain fewer images or videos than are given')
    positions[:, begin:] = np.arange(next_position, next_position + len(ids) - begin)
    if positions.max(initial=0) > np.iinfo(np.int32).max:
        raise ValueError('the position ids of input_ids exceed 32 bits; use shorter videos')
    return positions.astype(np.int32)


def _grid_positions(grid: Grid, merge_size: int, interval: float) -> npt.NDArray[np.int64]:
    """Return int64 [3, N], counted from 0: time, row and column of each token; the column changes fastest."""
    axes = np.indices((grid[0], grid[1] // merge_size, grid[2] // merge_size)).reshape(3, -1)
    # Multiplying in float32 and truncating gives the same positions as transformers.
    axes[0] = (axes[0].astype(np.float32) * np.float32(interval)).astype(np.int64)
    return axes
