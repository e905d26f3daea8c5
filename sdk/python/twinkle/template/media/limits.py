"""Limits for media from untrusted callers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Maximum sizes of the media in one chat, checked before decoding except where stated otherwise."""

    max_items: int = 64
    """Number of images, videos and audio clips in the chat."""
    max_bytes: int = 32 * 2**20
    """Size of one file in bytes, before decoding."""
    max_pixels: int = 2**25
    """Pixels of one image according to its header; 33 million pixels take 100 MB after decoding."""
    max_side: int = 2**15
    """Length of an image's longer side in pixels."""
    max_frames: int = 768
    """Frames of one video; the limit of Qwen2.5-VL's own processor."""
    max_video_pixels: int = 2**27
    """Pixels of all frames of one video; checked after the first frame is decoded."""
