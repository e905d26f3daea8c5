"""Specifications of a model's image, video and audio input: the tokens that represent it, and their count."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

MediaKind = Literal['image', 'video', 'audio']
Grid = tuple[int, int, int]
"""Numbers of patches of an image or video: time steps, rows and columns. For audio: frames of the clip, frames with
padding, and 1."""


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """Specification of the image and video input of a model."""

    kinds: ClassVar[tuple[MediaKind, ...]] = ('image', 'video')
    has_axes: ClassVar[bool] = True
    """Whether positions have the axes time, height and width."""
    image_token_id: int
    """Token that represents a part of an image."""
    video_token_id: int
    """Token that represents a part of a video."""
    merge_size: int
    """Side length, in patches, of the square that one token represents."""
    patch_width: int
    """Number of values of a patch: channels x frames of a time step x height x width."""
    temporal_patch_size: int
    """Number of frames in a time step."""
    tokens_per_second: float
    """Number of positions on the time axis for each second of video."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> 'VisionSpec':
        """Return the specification in Qwen2.5-VL's `config.json`; missing values have the defaults of transformers."""
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
        """Return the token that represents parts of this kind."""
        return self.image_token_id if kind == 'image' else self.video_token_id

    def token_count(self, grid: Grid) -> int:
        """Return the number of tokens that represent an image or video with this grid."""
        frames, rows, columns = grid
        return frames * (rows // self.merge_size) * (columns // self.merge_size)


@dataclass(frozen=True, kw_only=True)
class AudioSpec:
    """Specification of the audio input of a model."""

    kinds: ClassVar[tuple[MediaKind, ...]] = ('audio',)
    has_axes: ClassVar[bool] = False
    audio_token_id: int
    """Token that represents a part of an audio clip."""
    patch_width: int
    """Number of mel bands of a frame."""
    frame_count: int
    """Number of frames of every clip, including padding."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> 'AudioSpec':
        """Return the specification in Qwen2-Audio's `config.json`; missing values have the defaults of transformers."""
        audio: Mapping[str, Any] = config.get('audio_config') or {}
        token_id = config.get('audio_token_index', config.get('audio_token_id', 151646))
        return cls(
            audio_token_id=int(token_id),
            patch_width=int(audio.get('num_mel_bins', 128)),
            frame_count=2 * int(audio.get('max_source_positions', 1500)),
        )

    def token_id(self, kind: MediaKind) -> int:
        """Return the token that represents parts of audio clips."""
        del kind
        return self.audio_token_id

    def token_count(self, grid: Grid) -> int:
        """Return the number of tokens of a clip. A convolution with stride 2 is followed by a mean over two frames."""
        return ((grid[0] - 1) // 2 + 1 - 2) // 2 + 1


MediaSpec = VisionSpec | AudioSpec
"""Specification of the media input of a model."""
_SPECS: dict[str, type[VisionSpec] | type[AudioSpec]] = {'qwen2_5_vl': VisionSpec, 'qwen2_audio': AudioSpec}


def media_spec(config: Mapping[str, Any]) -> MediaSpec | None:
    """Return the specification in a model's `config.json`, or None if the model reads only text."""
    kind = _SPECS.get(config.get('model_type', ''))
    return None if kind is None else kind.of_config(config)
