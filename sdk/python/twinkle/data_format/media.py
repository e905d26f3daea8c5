"""How a model reads images, videos or audio: which tokens stand for them, and how many for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

MediaKind = Literal['image', 'video', 'audio']
Grid = tuple[int, int, int]
"""Patches of an image or video: frames (in steps of time), rows, columns. Of audio: frames with sound, all, and 1."""


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """What a model's configuration says of its images and videos."""

    kinds: ClassVar[tuple[MediaKind, ...]] = ('image', 'video')
    has_axes: ClassVar[bool] = True
    """Whether positions are of time, height and width."""
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
    def of_config(cls, config: Mapping[str, Any]) -> 'VisionSpec':
        """Return what `config.json` of Qwen2.5-VL says, with transformers' defaults."""
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


@dataclass(frozen=True, kw_only=True)
class AudioSpec:
    """What a model's configuration says of its audio."""

    kinds: ClassVar[tuple[MediaKind, ...]] = ('audio',)
    has_axes: ClassVar[bool] = False
    audio_token_id: int
    """Stands for a piece of sound."""
    patch_width: int
    """Mel bands of one frame."""
    frame_count: int
    """Frames of every clip, silence behind it included."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> 'AudioSpec':
        """Return what `config.json` of Qwen2-Audio says, with transformers' defaults."""
        audio: Mapping[str, Any] = config.get('audio_config') or {}
        token_id = config.get('audio_token_index', config.get('audio_token_id', 151646))
        return cls(
            audio_token_id=int(token_id),
            patch_width=int(audio.get('num_mel_bins', 128)),
            frame_count=2 * int(audio.get('max_source_positions', 1500)),
        )

    def token_id(self, kind: MediaKind) -> int:
        """Return the token that stands for pieces of sound."""
        del kind
        return self.audio_token_id

    def token_count(self, grid: Grid) -> int:
        """Return how many tokens a clip has: one convolution of stride 2, and a mean of two behind it."""
        return ((grid[0] - 1) // 2 + 1 - 2) // 2 + 1


MediaSpec = VisionSpec | AudioSpec
"""How a model reads what is not text."""
_SPECS: dict[str, type[VisionSpec] | type[AudioSpec]] = {'qwen2_5_vl': VisionSpec, 'qwen2_audio': AudioSpec}


def media_spec(config: Mapping[str, Any]) -> MediaSpec | None:
    """Return what a model's `config.json` says of images, videos or audio; None where it reads text alone."""
    kind = _SPECS.get(config.get('model_type', ''))
    return None if kind is None else kind.of_config(config)
