"""What is taken from strangers, before anything is decoded."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Most of everything in one chat."""

    max_items: int = 64
    """Images, videos and clips of audio."""
    max_bytes: int = 32 * 2**20
    """Of one file, before it is decoded."""
    max_pixels: int = 2**25
    """Of one image, by what its header says: 33 million, 100 MB once decoded."""
    max_side: int = 2**15
    """Pixels of an image's longer side."""
    max_frames: int = 768
    """Of one video; as many as Qwen2.5-VL's own processor takes."""
    max_video_pixels: int = 2**27
    """Of all frames of one video, by what their headers say."""
