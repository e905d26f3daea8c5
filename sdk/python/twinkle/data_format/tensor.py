"""A tensor as bytes: the one byte layout shared by wire, checkpoints and files.

Little-endian, C-contiguous, no padding. bfloat16 has no numpy type, so it is carried as
the upper 16 bits of a float32 and handled as uint16.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    'bool': np.dtype('?'),
    'uint8': np.dtype('u1'),
    'int32': np.dtype('<i4'),
    'int64': np.dtype('<i8'),
    'float16': np.dtype('<f2'),
    'bfloat16': np.dtype('<u2'),
    'float32': np.dtype('<f4'),
    'float64': np.dtype('<f8'),
}

DTYPE_NAMES = tuple(_NUMPY_DTYPES)
"""Every dtype a tensor may have, by name."""


@dataclass(frozen=True)
class TensorData:
    """A tensor of `dtype` and `shape` in the shared byte layout."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        """Refuse a dtype, shape or byte count that do not fit together.

        Raises:
            ValueError: says which of the three is wrong and what it should be.
        """
        if self.dtype not in _NUMPY_DTYPES:
            raise ValueError(f'dtype {self.dtype!r} is not one of {DTYPE_NAMES}')
        if any(size < 0 for size in self.shape):
            raise ValueError(f'shape {self.shape} has a negative size')
        expected = prod(self.shape) * _NUMPY_DTYPES[self.dtype].itemsize
        if len(self.data) != expected:
            raise ValueError(f'{self.dtype} {self.shape} needs {expected} bytes, got {len(self.data)}')

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any]) -> 'TensorData':
        """Copy `array` into the shared layout.

        Raises:
            ValueError: the array's dtype has no name here.
        """
        if array.dtype == np.uint16:
            raise ValueError('a numpy array cannot say that it holds bfloat16; build TensorData by hand')
        for name, dtype in _NUMPY_DTYPES.items():
            if array.dtype.newbyteorder('<') == dtype:
                return cls(name, array.shape, np.ascontiguousarray(array, dtype=dtype).tobytes())
        raise ValueError(f'dtype {array.dtype} is not one of {DTYPE_NAMES}')

    def to_numpy(self) -> npt.NDArray[Any]:
        """View the bytes as a read-only array; bfloat16 is widened to float32 (a copy)."""
        array = np.frombuffer(self.data, dtype=_NUMPY_DTYPES[self.dtype]).reshape(self.shape)
        if self.dtype == 'bfloat16':
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array
