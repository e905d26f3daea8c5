"""Tensors as bytes, in the layout that messages, checkpoints and files share.

The bytes are little-endian and in C order, without padding. NumPy has no bfloat16 type, so a bfloat16 value is stored
as the upper 16 bits of a float32 and handled as uint16.
"""

from dataclasses import dataclass
from math import prod
from pickle import PickleBuffer
from typing import Any, SupportsIndex

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

_OUT_OF_BAND = 5
"""First pickle protocol that can transfer bytes without a copy."""
DTYPE_NAMES = tuple(_NUMPY_DTYPES)
"""Names of all supported dtypes."""


@dataclass(frozen=True)
class TensorData:
    """A tensor in the shared byte layout."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle the tensor; with protocol 5, its bytes may be transferred without a copy."""
        return TensorData, (self.dtype, self.shape, picklable(self.data, protocol))

    def __post_init__(self) -> None:
        """Validate dtype, shape and number of bytes.

        Raises:
            ValueError: the dtype is unknown, a size is negative, or the number of bytes does not match.
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
            ValueError: the array's dtype is not supported, or is uint16, which is ambiguous.
        """
        if array.dtype == np.uint16:
            raise ValueError('uint16 could mean bfloat16; create TensorData with an explicit dtype')
        for name, dtype in _NUMPY_DTYPES.items():
            if array.dtype.newbyteorder('<') == dtype:
                return cls(name, array.shape, np.ascontiguousarray(array, dtype=dtype).tobytes())
        raise ValueError(f'dtype {array.dtype} is not one of {DTYPE_NAMES}')

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return a view of the bytes, read-only if `data` is; bfloat16 is converted to a float32 copy."""
        array = np.frombuffer(self.data, dtype=_NUMPY_DTYPES[self.dtype]).reshape(self.shape)
        if self.dtype == 'bfloat16':
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array


def number_array(
    value: Any, dtype: type[np.int32 | np.float32], *, dimensions: int = 1, field: str
) -> npt.NDArray[Any]:
    """Convert a list, array or tensor on the CPU to a new array.

    A leading dimension of 1, which some collators add, is dropped.

    Args:
        value: Any value that numpy can convert.
        dtype: Dtype of the result.
        dimensions: Number of dimensions of the result.
        field: Name of the value for error messages.

    Raises:
        ValueError: The value has other dimensions or is not numeric; or `dtype` is int32, and the value has floats or
            an integer that is out of range.
    """
    array = np.asarray(value)
    if array.ndim == dimensions + 1 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != dimensions:
        raise ValueError(f'{field} must have {dimensions} dimension(s), got shape {array.shape}')
    if array.size and array.dtype.kind not in 'biuf':
        raise ValueError(f'{field} must contain numbers, got {array.dtype}')
    if array.size and dtype is np.int32:
        bounds = np.iinfo(np.int32)
        if array.dtype.kind == 'f' or array.min() < bounds.min or array.max() > bounds.max:
            raise ValueError(
                f'{field} must contain integers in [{bounds.min}, {bounds.max}], '
                f'got {array.dtype} values from {array.min()} to {array.max()}'
            )
    return array.astype(dtype)


def picklable(data: bytes | memoryview, protocol: SupportsIndex) -> PickleBuffer | bytes:
    """Return bytes in a form that can be pickled; pickle cannot store a memoryview.

    With protocol 5, the receiver of out-of-band buffers decides where the bytes are stored, for example in the shared
    memory of Ray's object store.
    """
    return PickleBuffer(data) if protocol.__index__() >= _OUT_OF_BAND else bytes(data)
