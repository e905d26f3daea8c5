"""Opens images and videos that strangers send: nothing is fetched, and nothing is decoded before it was measured."""

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
"""What is decoded. Formats that run programs or nest others are not among them."""
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, ArithmeticError, MemoryError, LookupError, TypeError, AttributeError,
    RuntimeError, UserWarning, struct.error, zlib.error,
)  # fmt: skip
"""What Pillow raises for files that are cut off or wrong, and warns of where a program has made warnings errors."""
_LEAST_RATE = 0.001
"""Frames a second: positions count time, and below this those of a long video are of no model."""


@dataclass(frozen=True)
class Video:
    """A video as pictures."""

    frames: Sequence[Image.Image]
    """RGB, all of one size."""
    frames_per_second: float


@dataclass(frozen=True, kw_only=True)
class MediaLoader:
    """Opens what a chat names.

    Args:
        limits: what is refused unread.
        is_path_allowed: whether files of this machine may be named; a service that serves strangers says no.
    """

    limits: MediaLimits = field(default_factory=MediaLimits)
    is_path_allowed: bool = True

    def image(self, source: Any, place: str) -> Image.Image:
        """Return an image as RGB, turned as its camera says.

        Args:
            source: a path, `data:` or `file:` address, bytes, `{'bytes': ...}` or `{'path': ...}` as datasets hold
                them, `{'url': ...}`, a Pillow image, or an array uint8 [height, width, 3].
            place: of the field, for refusals.

        Raises:
            InvalidTrajectory: names the field: it cannot be had, or is no image, or larger than the limits.
        """
        if isinstance(source, Image.Image):
            return self._checked(source, place)
        if isinstance(source, np.ndarray):
            return self.image(_of_array(cast('np.ndarray[Any, Any]', source), place), place)
        content = self._bytes(source, place)
        try:
            opened = Image.open(io.BytesIO(content), formats=FORMATS)
        except _BOMBS:
            raise InvalidTrajectory(place, f'has more than max_pixels {self.limits.max_pixels}') from None
        except UnidentifiedImageError:
            raise InvalidTrajectory(place, f'is no image of {", ".join(FORMATS)}') from None
        except _BROKEN as error:
            raise InvalidTrajectory(place, f'is broken: {type(error).__name__}') from None
        return self._checked(opened, place)

    def sound(self, source: Any, place: str) -> Sound:
        """Return a clip of audio.

        Args:
            source: a WAV file as a path, `data:` address or bytes, or `{'array': ..., 'sampling_rate': ...}`.
            place: of the field, for refusals.

        Raises:
            InvalidTrajectory: names the field.
        """
        return sound_of_array(source, place) or sound_of_wav(self._bytes(source, place), place)

    def video(self, source: Any, place: str) -> Video:
        """Return a video as frames.

        Args:
            source: a list of images, or `{'video': [...], 'fps': 2.0}`; 'fps' unset means 2, as Qwen2.5-VL samples.
            place: of the field, for refusals.

        Raises:
            InvalidTrajectory: names the field; also for files, which nothing here decodes.
        """
        fields = cast('Mapping[str, Any]', source) if isinstance(source, Mapping) else {'video': source}
        rate: Any = fields.get('fps', 2.0)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not _LEAST_RATE <= rate <= 1000:
            raise InvalidTrajectory(f'{place}.fps', f'must be frames a second, {_LEAST_RATE} to 1000, got {rate!r}')
        frames: Any = fields.get('video')
        if isinstance(frames, str | bytes | Mapping) or not isinstance(frames, Sequence) or not frames:
            raise InvalidTrajectory(place, 'must be a list of frames; no decoder of video files is installed')
        given = cast('Sequence[Any]', frames)
        if len(given) > self.limits.max_frames:
            raise InvalidTrajectory(place, f'has {len(given)} frames, more than max_frames {self.limits.max_frames}')
        images: list[Image.Image] = []
        for index, frame in enumerate(given):
            images.append(self.image(frame, f'{place}[{index}]'))
            if images[-1].size != images[0].size:
                raise InvalidTrajectory(f'{place}[{index}]', f'is {images[-1].size}, the first frame {images[0].size}')
            width, height = images[0].size
            if width * height * len(given) > self.limits.max_video_pixels:
                raise InvalidTrajectory(place, f'has more than max_video_pixels {self.limits.max_video_pixels}')
        return Video(images, float(rate))

    def _bytes(self, source: Any, place: str) -> bytes:
        """Return a file's content."""
        if isinstance(source, bytes | bytearray | memoryview):
            content = bytes(cast(Any, source))
        elif isinstance(source, str | Path):
            content = self._named(str(source), place)
        elif isinstance(source, Mapping):
            fields = cast('Mapping[str, Any]', source)
            name = next((one for one in ('bytes', 'url', 'path', 'base64') if fields.get(one) is not None), '')
            held = fields.get(name)
            if held is None or isinstance(held, Mapping):
                raise InvalidTrajectory(place, 'must hold bytes, url, path or base64')
            is_bare = name == 'base64' and isinstance(held, str) and not held.startswith('data:')
            return self._bytes(f'data:;base64,{held}' if is_bare else held, place)
        else:
            raise InvalidTrajectory(
                place, f'must be a path, bytes, data: address or image, got {type(source).__name__}'
            )
        self._check_bytes(len(content), place)
        return content

    def _named(self, name: str, place: str) -> bytes:
        if name.startswith('data:'):
            return self._of_data(name, place)
        try:
            scheme = urlsplit(name).scheme
        except ValueError:
            raise InvalidTrajectory(place, 'is neither a path nor an address') from None
        if len(scheme) > 1 and scheme != 'file':
            raise InvalidTrajectory(place, f'is an address of {scheme}:, and nothing is fetched; give the bytes')
        if not self.is_path_allowed:
            raise InvalidTrajectory(place, 'names a file, which is not read here; give its bytes')
        path = Path(unquote(urlsplit(name).path) if scheme == 'file' else name)
        try:
            if not path.is_file():
                raise InvalidTrajectory(place, 'is not there; give the path of a file')
            self._check_bytes(path.stat().st_size, place)
            return path.read_bytes()
        except (OSError, ValueError) as error:
            if isinstance(error, InvalidTrajectory):
                raise
            raise InvalidTrajectory(place, f'cannot be read: {type(error).__name__}') from None

    def _of_data(self, address: str, place: str) -> bytes:
        """Return what a `data:` address holds (RFC 2397)."""
        head, comma, body = address.partition(',')
        if not comma or not head.endswith(';base64'):
            raise InvalidTrajectory(place, 'must be a data: address in base64')
        self._check_bytes(len(body) * 3 // 4, place)
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidTrajectory(place, 'is not base64') from None

    def _check_bytes(self, count: int, place: str) -> None:
        if count > self.limits.max_bytes:
            raise InvalidTrajectory(place, f'has {count} bytes, more than max_bytes {self.limits.max_bytes}')

    def _checked(self, image: Image.Image, place: str) -> Image.Image:
        """Return an opened image as RGB, having measured it first."""
        self._check_size(image, place)
        if _frame_count(image, place) > 1:
            raise InvalidTrajectory(place, 'has several frames; give them as a video')
        if image.mode[0] in 'IF':
            # Pillow would cut such numbers off at 255.
            raise InvalidTrajectory(place, f'has pixels of mode {image.mode}; give 8 bits a channel')
        return _decoded(image, place)

    def _check_size(self, image: Image.Image, place: str) -> None:
        width, height = image.size
        if width * height > self.limits.max_pixels:
            raise InvalidTrajectory(
                place, f'has {width} x {height} pixels, more than max_pixels {self.limits.max_pixels}'
            )
        if not 0 < max(width, height) <= self.limits.max_side or not min(width, height):
            raise InvalidTrajectory(place, f'has {width} x {height} pixels; its sides are 1 to {self.limits.max_side}')


def _frame_count(image: Image.Image, place: str) -> int:
    try:
        return int(getattr(image, 'n_frames', 1))
    except _BROKEN as error:
        raise InvalidTrajectory(place, f'is broken: {type(error).__name__}') from None


def _decoded(image: Image.Image, place: str) -> Image.Image:
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert('RGB')
    except _BOMBS + _BROKEN as error:
        raise InvalidTrajectory(place, f'is broken: {type(error).__name__}') from None


def _of_array(pixels: 'np.ndarray[Any, Any]', place: str) -> Image.Image:
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or not pixels.size:
        raise InvalidTrajectory(place, f'must be uint8 [height, width, 3], got {pixels.dtype} {list(pixels.shape)}')
    return Image.fromarray(pixels)
