"""How a model reads images and videos: which tokens stand for them, and how many for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MediaKind = Literal['image', 'video']
Grid = tuple[int, int, int]
"""Patches of an image or video: frames (in steps of time), rows, columns."""

VISION_MODEL_TYPES = ('qwen2_5_vl',)
"""The `model_type` of configurations whose images and videos are read."""


@dataclass(frozen=True, kw_only=True)
class MediaSpec:
    """What a model's configuration says of its images and videos."""

    image_token_id: int
    """Stands for a piece of an image."""
    video_token_id: int
    """Stands for a piece of a video."""
    merge_size: int
    """Patches along a side of the square that becomes one token."""
    patch_width: int
    """Numbers of one patch: channels x frames of a step x height x width."""
    temporal_patch_size: int
    """Frames that one step of time holds."""
    tokens_per_second: float
    """Positions on the axis of time that a second of video takes."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> 'MediaSpec | None':
        """Return what `config.json` says, with transformers' defaults; None for a model that reads text alone."""
        if config.get('model_type') not in VISION_MODEL_TYPES:
            return None
        vision: Mapping[str, Any] = config.get('vision_config') or {}
        side, frames = int(vision.get('patch_size', 14)), int(vision.get('temporal_patch_size', 2))
        return cls(
            image_token_id=int(config.get('image_token_id', 151655)),
            video_token_id=int(config.get('video_token_id', 151656)),
            merge_size=int(vision.get('spatial_merge_size', 2)),
            patch_width=int(vision.get('in_channels', 3)) * frames * side * side,
            temporal_patch_size=frames,
            tokens_per_second=float(vision.get('tokens_per_second', 4)),
        )

    def token_id(self, kind: MediaKind) -> int:
        """Return the token that stands for pieces of this kind."""
        return self.image_token_id if kind == 'image' else self.video_token_id

    def token_count(self, grid: Grid) -> int:
        """Return how many tokens stand for an image or video of this many patches."""
        frames, rows, columns = grid
        return frames * (rows // self.merge_size) * (columns // self.merge_size)
