"""Sound as numbers: from WAV files by the standard library, or from arrays."""

import io
import struct
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twinkle.template.errors import InvalidTrajectory

_WIDTHS = {1: np.dtype('u1'), 2: np.dtype('<i2'), 4: np.dtype('<i4')}
"""Bytes of a sample to its type; WAV holds single bytes without a sign."""

_LOUDEST = 2.0
"""Resampling goes a little beyond 1; whole numbers of 16 bits, written as floats, lie far beyond this."""
_BROKEN = (wave.Error, EOFError, OSError, ValueError, ZeroDivisionError, RuntimeError, struct.error)
"""What the standard library raises for files that are cut off or no WAV."""


@dataclass(frozen=True)
class Sound:
    """One clip of one channel."""

    samples: npt.NDArray[np.float32]
    """In -1 to 1."""
    rate: int
    """Samples a second."""


def sound_of_array(given: Any, place: str) -> Sound | None:
    """Return sound that is given as numbers, None where it is not.

    Args:
        given: `{'array': ..., 'sampling_rate': ...}`, as datasets hold audio.
        place: of the field, for refusals.

    Raises:
        InvalidTrajectory: they are no samples of one channel.
    """
    if not isinstance(given, Mapping) or cast('Mapping[str, Any]', given).get('array') is None:
        return None
    fields = cast('Mapping[str, Any]', given)
    rate: Any = fields.get('sampling_rate')
    try:
        samples = np.asarray(fields['array'])
    except (ValueError, TypeError, RuntimeError):
        raise InvalidTrajectory(place, 'must be finite floats [T]') from None
    if samples.ndim != 1 or samples.dtype.kind != 'f' or not len(samples) or not np.isfinite(samples).all():
        raise InvalidTrajectory(place, f'must be finite floats [T], got {samples.dtype} {list(samples.shape)}')
    if np.abs(samples).max() > _LOUDEST:
        raise InvalidTrajectory(place, f'must be floats in -1 to 1, got {np.abs(samples).max():.3g}; scale them')
    if not isinstance(rate, int | np.integer) or isinstance(rate, bool) or rate < 1:
        raise InvalidTrajectory(f'{place}.sampling_rate', f'must be samples a second, got {rate!r}')
    return Sound(samples.astype(np.float32), int(cast('Any', rate)))


def sound_of_wav(content: bytes, place: str) -> Sound:
    """Return the sound of a WAV file, its channels mixed to one.

    Raises:
        InvalidTrajectory: it is none, or not of 8, 16 or 32 bits.
    """
    try:
        with wave.open(io.BytesIO(content)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except _BROKEN:
        raise InvalidTrajectory(place, 'is no WAV file of plain samples; other forms are not decoded') from None
    if width not in _WIDTHS or rate < 1:
        raise InvalidTrajectory(place, f'has samples of {8 * width} bits; give 8, 16 or 32')
    whole = len(frames) // (width * channels) * (width * channels)
    numbers = np.frombuffer(frames[:whole], _WIDTHS[width]).reshape(-1, channels).astype(np.float64)
    if not len(numbers):
        raise InvalidTrajectory(place, 'is silent: it has no samples')
    half = float(2 ** (8 * width - 1))
    centred = numbers - half if width == 1 else numbers
    return Sound((centred.mean(axis=1) / half).astype(np.float32), rate)
