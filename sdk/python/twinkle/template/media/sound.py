"""Decode audio from WAV files (with the standard library) or from arrays."""

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
"""Map from bytes per sample to dtype; one-byte samples in WAV files are unsigned."""

_MAX_AMPLITUDE = 2.0
"""Maximum accepted amplitude. Resampled audio may slightly exceed 1; unscaled 16-bit values are far above 2."""
_DECODE_ERRORS = (wave.Error, EOFError, OSError, ValueError, ZeroDivisionError, RuntimeError, struct.error)
"""Exceptions of the standard library for truncated and non-WAV files."""


@dataclass(frozen=True)
class Sound:
    """One audio clip with one channel."""

    samples: npt.NDArray[np.float32]
    """Amplitudes [T], nominally in -1 to 1; arrays given by the caller may reach 2."""
    rate: int
    """Sampling rate in samples per second."""


def sound_of_array(given: Any, field_path: str) -> Sound | None:
    """Return the clip of an array with its sampling rate, or None if `given` has another form.

    Args:
        given: `{'array': ..., 'sampling_rate': ...}`, the form of Hugging Face datasets.
        field_path: path of the field, for error messages.

    Raises:
        InvalidTrajectory: the array or the rate is invalid.
    """
    if not isinstance(given, Mapping) or cast('Mapping[str, Any]', given).get('array') is None:
        return None
    fields = cast('Mapping[str, Any]', given)
    rate: Any = fields.get('sampling_rate')
    try:
        samples = np.asarray(fields['array'])
    except (ValueError, TypeError, RuntimeError):
        raise InvalidTrajectory(field_path, 'must be a non-empty one-dimensional array of finite floats') from None
    if samples.ndim != 1 or samples.dtype.kind != 'f' or not len(samples) or not np.isfinite(samples).all():
        problem = f'non-empty one-dimensional array of finite floats, got {samples.dtype} {list(samples.shape)}'
        raise InvalidTrajectory(field_path, f'must be a {problem}')
    if np.abs(samples).max() > _MAX_AMPLITUDE:
        problem = f'must be floats between -1 and 1, got an amplitude of {np.abs(samples).max():.3g}; scale them'
        raise InvalidTrajectory(field_path, problem)
    if not isinstance(rate, int | np.integer) or isinstance(rate, bool) or rate < 1:
        problem = f'must be an integer number of samples per second, at least 1, got {rate!r}'
        raise InvalidTrajectory(f'{field_path}.sampling_rate', problem)
    return Sound(samples.astype(np.float32), int(cast('Any', rate)))


def sound_of_wav(content: bytes, field_path: str) -> Sound:
    """Return the clip in a WAV file; several channels are averaged to one.

    Raises:
        InvalidTrajectory: the content is not a WAV file of 8, 16 or 32 bit PCM samples, or has no samples or rate.
    """
    try:
        with wave.open(io.BytesIO(content)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except _DECODE_ERRORS:
        raise InvalidTrajectory(
            field_path, 'is not a WAV file of PCM samples; other formats are not supported'
        ) from None
    if width not in _WIDTHS:
        raise InvalidTrajectory(field_path, f'has samples of {8 * width} bits; use 8, 16 or 32 bits')
    if rate < 1:
        raise InvalidTrajectory(field_path, f'must have at least 1 sample per second, its header has {rate}')
    whole = len(frames) // (width * channels) * (width * channels)
    numbers = np.frombuffer(frames[:whole], _WIDTHS[width]).reshape(-1, channels).astype(np.float64)
    if not len(numbers):
        raise InvalidTrajectory(field_path, 'is empty: it has no samples')
    half = float(2 ** (8 * width - 1))
    centred = numbers - half if width == 1 else numbers
    return Sound((centred.mean(axis=1) / half).astype(np.float32), rate)
