"""Conversion between float32 arrays and the bytes of floating-point tensors, including bfloat16, which numpy lacks."""

from typing import Any

import numpy as np
import numpy.typing as npt

FLOAT_DTYPES = ('float16', 'bfloat16', 'float32', 'float64')
"""Data types that can be converted."""

_NUMPY: dict[str, np.dtype[Any]] = {'float16': np.dtype('<f2'), 'float32': np.dtype('<f4'), 'float64': np.dtype('<f8')}
_QUIET = np.uint32(0x7FC0)
"""Bits that are set in a bfloat16 NaN, so that truncation cannot turn a NaN into infinity."""


def to_float32(data: bytes | memoryview, dtype: str) -> npt.NDArray[np.float32]:
    """Return the values as a flat array, which is a view of `data` for float32."""
    if dtype == 'bfloat16':
        return (np.frombuffer(data, '<u2').astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(data, _NUMPY[dtype]).astype(np.float32, copy=False)


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Return the bytes of the values in `dtype`, rounded to nearest even. Values out of range become infinite."""
    if dtype == 'bfloat16':
        return _bfloat16(values).tobytes()
    with np.errstate(over='ignore'):
        return values.astype(_NUMPY[dtype]).tobytes()


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = bits >> np.uint32(16)
    # Adds 0x7FFF, or 0x8000 if the lowest remaining bit is 1, so that ties round to even.
    rounded = (bits + (upper & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
    return np.where(np.isnan(values), upper | _QUIET, rounded).astype('<u2')


def is_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Return whether all values are finite, without copying float16, float32 and float64 data."""
    if dtype == 'bfloat16':
        # All bits of the exponent are set in infinities and NaN.
        exponents = np.frombuffer(data, '<u2') & np.uint16(0x7F80)
        return not bool((exponents == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(data, _NUMPY[dtype])).all())
