"""Arrays to messages and back."""

from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import DTYPE_NAMES, TensorData

_NAMES: dict[int, str] = {tensor_pb2.Dtype.Value(f'DTYPE_{name.upper()}'): name for name in DTYPE_NAMES}
_NUMBERS: dict[str, tensor_pb2.Dtype.ValueType] = {
    name: tensor_pb2.Dtype.Value(f'DTYPE_{name.upper()}') for name in DTYPE_NAMES
}


def dtype_number(name: str) -> tensor_pb2.Dtype.ValueType:
    """Return the number of an element type.

    Raises:
        ValueError: it has no name in the contract.
    """
    if name not in _NUMBERS:
        raise ValueError(f'dtype {name!r} is not one of {DTYPE_NAMES}')
    return _NUMBERS[name]


def tensor_to_proto(array: npt.NDArray[Any]) -> tensor_pb2.Tensor:
    """Return `array` as a message.

    Raises:
        ValueError: its dtype has no name in the contract.
    """
    data = TensorData.from_numpy(array)
    return tensor_pb2.Tensor(dtype=_NUMBERS[data.dtype], shape=data.shape, data=bytes(data.data))


def tensor_from_proto(tensor: tensor_pb2.Tensor) -> npt.NDArray[Any]:
    """Return the array of a message, read-only.

    Raises:
        ValueError: the server sent a tensor that does not add up.
    """
    return TensorData(_NAMES.get(tensor.dtype, '?'), tuple(tensor.shape), tensor.data).to_numpy()


def vector(value: Any, dtype: type[np.int32 | np.float32], *, field: str) -> npt.NDArray[Any]:
    """Return a list, array or tensor as a one-dimensional array.

    A leading dimension of 1, as collators add it, is dropped.

    Args:
        value: anything numpy can read, torch tensors on the CPU included.
        dtype: of the result.
        field: for the error.

    Raises:
        ValueError: it is not one-dimensional, not numeric, or loses integer digits.
    """
    return _numbers(value, dtype, dimensions=1, field=field)


def matrix(value: Any, dtype: type[np.int32 | np.float32], *, field: str) -> npt.NDArray[Any]:
    """Return lists, an array or a tensor as a two-dimensional array; arguments and errors as `vector`."""
    return _numbers(value, dtype, dimensions=2, field=field)


def _numbers(value: Any, dtype: type[np.int32 | np.float32], *, dimensions: int, field: str) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.ndim == dimensions + 1 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != dimensions:
        raise ValueError(f'{field} must have {dimensions} dimension(s), got shape {array.shape}')
    if array.size and array.dtype.kind not in 'biuf':
        raise ValueError(f'{field} must hold numbers, got {array.dtype}')
    if array.size and dtype is np.int32:
        bounds = np.iinfo(np.int32)
        if array.dtype.kind == 'f' or array.min() < bounds.min or array.max() > bounds.max:
            raise ValueError(f'{field} must hold integers in [{bounds.min}, {bounds.max}]')
    return array.astype(dtype)
