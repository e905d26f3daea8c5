"""Decode images, videos and audio from untrusted callers, within `MediaLimits`; nothing is downloaded."""

import base64
import binascii
import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from twinkle.template.errors import InvalidTrajectory
from twinkle.template.media.limits import MediaLimits
from twinkle.template.media.sound import Sound, sound_of_array, sound_of_wav

FORMATS = ('PNG', 'JPEG', 'WEBP', 'GIF', 'BMP')
"""Supported image formats, without formats that can contain programs or other formats."""
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
"""Exceptions of Pillow for images with too many pixels."""
_DECODE_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, ArithmeticError, MemoryError, LookupError, TypeError, AttributeError,
    RuntimeError, UserWarning, struct.error, zlib.error,
)  # fmt: skip
"""Exceptions of Pillow for truncated or invalid files, including warnings that a program turns into errors."""
_MIN_FRAME_RATE = 0.001
"""Minimum frames per second; at lower rates the temporal positions of a long video exceed the maximum of any model."""


@dataclass(frozen=True)
class Video:
    """A decoded video."""

    frames: Sequence[Image.Image]
    """RGB images of equal size, at least one."""
    frames_per_second: float
    """Frame rate, 0.001 to 1000."""


@dataclass(frozen=True, kw_only=True)
class MediaLoader:
    """Decodes the images, videos and audio of a chat.

    Args:
        limits: maximum sizes; larger media are refused. Default: `MediaLimits()`.
        is_path_allowed: whether local files may be read; a service with untrusted callers sets False. Default: True.
    """

    limits: MediaLimits = field(default_factory=MediaLimits)
    is_path_allowed: bool = True

    def image(self, source: Any, field_path: str) -> Image.Image:
        """Return an image as RGB, rotated according to its EXIF orientation.

        Args:
            source: a path, a `data:` or `file:` URL, bytes, `{'bytes': ...}` or `{'path': ...}` as in Hugging Face
                datasets, `{'url': ...}`, `{'base64': ...}`, a Pillow image, or a uint8 array [height, width, 3].
            field_path: path of the field, for error messages.

        Raises:
            InvalidTrajectory: the source cannot be read, is not an image, or exceeds the limits.
        """
        if isinstance(source, Image.Image):
            return self._checked(source, field_path)
        if isinstance(source, np.ndarray):
            return self.image(_from_array(cast('np.ndarray[Any, Any]', source), field_path), field_path)
        content = self._bytes(source, field_path)
        try:
            opened = Image.open(io.BytesIO(content), formats=FORMATS)
        except _BOMBS:
            raise InvalidTrajectory(field_path, f'has more than max_pixels {self.limits.max_pixels}') from None
        except UnidentifiedImageError:
            raise InvalidTrajectory(field_path, f'is not an image in one of the formats {", ".join(FORMATS)}') from None
        except _DECODE_ERRORS as error:
            raise InvalidTrajectory(field_path, f'cannot be decoded: {type(error).__name__}') from None
        return self._checked(opened, field_path)

    def sound(self, source: Any, field_path: str) -> Sound:
        """Return an audio clip.

        Args:
            source: a WAV file as a path, `data:` URL or bytes, or `{'array': ..., 'sampling_rate': ...}` with floats
                [T] in -1 to 1 and samples per second.
            field_path: path of the field, for error messages.

        Raises:
            InvalidTrajectory: the source cannot be read, is not audio, or exceeds the limits.
        """
        return sound_of_array(source, field_path) or sound_of_wav(self._bytes(source, field_path), field_path)

    def video(self, source: Any, field_path: str) -> Video:
        """Return a video as frames.

        Args:
            source: a list of images, or `{'video': [...], 'fps': 2.0}`. `fps` is in frames per second, 0.001 to 1000;
                default: 2, the rate of Qwen2.5-VL.
            field_path: path of the field, for error messages.

        Raises:
            InvalidTrajectory: the video exceeds the limits, its frames differ in size or cannot be read, or the source
                is a video file, because no video decoder is installed.
        """
        fields = cast('Mapping[str, Any]', source) if isinstance(source, Mapping) else {'video': source}
        rate: Any = fields.get('fps', 2.0)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not _MIN_FRAME_RATE <= rate <= 1000:
            problem = f'must be frames per second, {_MIN_FRAME_RATE} to 1000, got {rate!r}'
            raise InvalidTrajectory(f'{field_path}.fps', problem)
        frames: Any = fields.get('video')
        if isinstance(frames, str | bytes | Mapping) or not isinstance(frames, Sequence) or not frames:
            raise InvalidTrajectory(field_path, 'must be a list of frames; no decoder of video files is installed')
        given = cast('Sequence[Any]', frames)
        if len(given) > self.limits.max_frames:
            raise InvalidTrajectory(
                field_path, f'has {len(given)} frames, more than max_frames {self.limits.max_frames}'
            )
        images: list[Image.Image] = []
        for index, frame in enumerate(given):
            images.append(self.image(frame, f'{field_path}[{index}]'))
            if images[-1].size != images[0].size:
                problem = f'has the size {images[-1].size}, but the first frame has {images[0].size}'
                raise InvalidTrajectory(f'{field_path}[{index}]', problem)
            width, height = images[0].size
            if width * height * len(given) > self.limits.max_video_pixels:
                raise InvalidTrajectory(field_path, f'has more than max_video_pixels {self.limits.max_video_pixels}')
        return Video(images, float(rate))

    def _bytes(self, source: Any, field_path: str) -> bytes:
        if isinstance(source, bytes | bytearray | memoryview):
            content = bytes(cast(Any, source))
        elif isinstance(source, str | Path):
            content = self._from_name(str(source), field_path)
        elif isinstance(source, Mapping):
            fields = cast('Mapping[str, Any]', source)
            name = next((one for one in ('bytes', 'url', 'path', 'base64') if fields.get(one) is not None), '')
            value = fields.get(name)
            if value is None or isinstance(value, Mapping):
                raise InvalidTrajectory(field_path, 'must contain bytes, url, path or base64')
            is_bare = name == 'base64' and isinstance(value, str) and not value.startswith('data:')
            return self._bytes(f'data:;base64,{value}' if is_bare else value, field_path)
        else:
            raise InvalidTrajectory(
                field_path, f'must be a path, bytes, data: URL or image, got {type(source).__name__}'
            )
        self._check_bytes(len(content), field_path)
        return content

    def _from_name(self, name: str, field_path: str) -> bytes:
        if name.startswith('data:'):
            return self._from_data_url(name, field_path)
        try:
            scheme = urlsplit(name).scheme
        except ValueError:
            raise InvalidTrajectory(field_path, 'is neither a path nor a URL') from None
        if len(scheme) > 1 and scheme != 'file':
            raise InvalidTrajectory(
                field_path, f'is a URL with scheme {scheme}:, which is not downloaded; pass the bytes'
            )
        if not self.is_path_allowed:
            raise InvalidTrajectory(field_path, 'is a path, but local files are not read here; pass the bytes')
        path = Path(unquote(urlsplit(name).path) if scheme == 'file' else name)
        try:
            if not path.is_file():
                raise InvalidTrajectory(field_path, 'does not exist or is not a file; pass the path of a file')
            self._check_bytes(path.stat().st_size, field_path)
            return path.read_bytes()
        except (OSError, ValueError) as error:
            if isinstance(error, InvalidTrajectory):
                raise
            raise InvalidTrajectory(field_path, f'cannot be read: {type(error).__name__}') from None

    def _from_data_url(self, address: str, field_path: str) -> bytes:
        """Return the content of a `data:` URL (RFC 2397)."""
        head, comma, body = address.partition(',')
        if not comma or not head.endswith(';base64'):
            raise InvalidTrajectory(field_path, 'must be a data: URL in base64')
        self._check_bytes(len(body) * 3 // 4, field_path)
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidTrajectory(field_path, 'is not valid base64') from None

    def _check_bytes(self, count: int, field_path: str) -> None:
        if count > self.limits.max_bytes:
            raise InvalidTrajectory(field_path, f'has {count} bytes, more than max_bytes {self.limits.max_bytes}')

    def _checked(self, image: Image.Image, field_path: str) -> Image.Image:
        """Return an opened image as RGB after checking its size."""
        self._check_size(image, field_path)
        if _frame_count(image, field_path) > 1:
            raise InvalidTrajectory(field_path, 'has several frames; pass them as a video')
        if image.mode[0] in 'IF':
            # Pillow would clip such values at 255.
            raise InvalidTrajectory(field_path, f'has pixels of mode {image.mode}; convert it to 8 bits per channel')
        return _decoded(image, field_path)

    def _check_size(self, image: Image.Image, field_path: str) -> None:
        width, height = image.size
        if width * height > self.limits.max_pixels:
            raise InvalidTrajectory(
                field_path, f'has {width} x {height} pixels, more than max_pixels {self.limits.max_pixels}'
            )
        if not 0 < max(width, height) <= self.limits.max_side or not min(width, height):
            problem = f'has {width} x {height} pixels; each side must have 1 to {self.limits.max_side} pixels'
            raise InvalidTrajectory(field_path, problem)


def _frame_count(image: Image.Image, field_path: str) -> int:
    try:
        return int(getattr(image, 'n_frames', 1))
    except _DECODE_ERRORS as error:
        raise InvalidTrajectory(field_path, f'cannot be decoded: {type(error).__name__}') from None


def _decoded(image: Image.Image, field_path: str) -> Image.Image:
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert('RGB')
    except _BOMBS + _DECODE_ERRORS as error:
        raise InvalidTrajectory(field_path, f'cannot be decoded: {type(error).__name__}') from None


def _from_array(pixels: 'np.ndarray[Any, Any]', field_path: str) -> Image.Image:
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or not pixels.size:
        raise InvalidTrajectory(
            field_path, f'must be uint8 [height, width, 3], got {pixels.dtype} {list(pixels.shape)}'
        )
    return Image.fromarray(pixels)
