"""Floating-point numbers in the shared byte layout, to float32 and back. numpy has no bfloat16; this has."""

from typing import Any

import numpy as np
import numpy.typing as npt

FLOAT_DTYPES = ('float16', 'bfloat16', 'float32', 'float64')
"""What can be converted."""

_NUMPY: dict[str, np.dtype[Any]] = {'float16': np.dtype('<f2'), 'float32': np.dtype('<f4'), 'float64': np.dtype('<f8')}
_QUIET = np.uint32(0x7FC0)


def to_float32(data: bytes | memoryview, dtype: str) -> npt.NDArray[np.float32]:
    """Return the numbers as a flat array; float32 is a view."""
    if dtype == 'bfloat16':
        return (np.frombuffer(data, '<u2').astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(data, _NUMPY[dtype]).astype(np.float32, copy=False)


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Return numbers in the layout, rounded to the nearest, a tie to the even one; beyond the range is infinite."""
    if dtype == 'bfloat16':
        return _bfloat16(values).tobytes()
    with np.errstate(over='ignore'):
        return values.astype(_NUMPY[dtype]).tobytes()


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = bits >> np.uint32(16)
    # Half of the last place, less one where the last bit that stays is 0: a tie goes to the even one.
    rounded = (bits + (upper & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
    return np.where(np.isnan(values), upper | _QUIET, rounded).astype('<u2')


def is_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Say whether none of the numbers is infinite or no number; nothing is copied."""
    if dtype == 'bfloat16':
        # All bits of the exponent set: infinite, or no number.
        exponents = np.frombuffer(data, '<u2') & np.uint16(0x7F80)
        return not bool((exponents == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(data, _NUMPY[dtype])).all())
