"""Conversion between arrays and tensor messages."""

from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import DTYPE_NAMES, TensorData, number_array

_NAMES: dict[int, str] = {tensor_pb2.Dtype.Value(f'DTYPE_{name.upper()}'): name for name in DTYPE_NAMES}
_NUMBERS: dict[str, tensor_pb2.Dtype.ValueType] = {
    name: tensor_pb2.Dtype.Value(f'DTYPE_{name.upper()}') for name in DTYPE_NAMES
}


def dtype_number(name: str) -> tensor_pb2.Dtype.ValueType:
    """Return the contract's enum value of an element type.

    Raises:
        ValueError: The contract does not support the type.
    """
    if name not in _NUMBERS:
        raise ValueError(f'dtype must be one of {DTYPE_NAMES}, got {name!r}')
    return _NUMBERS[name]


def tensor_to_proto(array: npt.NDArray[Any]) -> tensor_pb2.Tensor:
    """Return the message of an array.

    Raises:
        ValueError: The contract does not support the dtype.
    """
    data = TensorData.from_numpy(array)
    return tensor_pb2.Tensor(dtype=_NUMBERS[data.dtype], shape=data.shape, data=bytes(data.data))


def tensor_from_proto(tensor: tensor_pb2.Tensor) -> npt.NDArray[Any]:
    """Return the read-only array of a message.

    Raises:
        ValueError: The tensor's dtype, shape and size are inconsistent.
    """
    return TensorData(_NAMES.get(tensor.dtype, '?'), tuple(tensor.shape), tensor.data).to_numpy()


def vector(value: Any, dtype: type[np.int32 | np.float32], *, field: str) -> npt.NDArray[Any]:
    """Convert a list, array or tensor to a one-dimensional array.

    A leading dimension of 1, which some collators add, is dropped.

    Args:
        value: Any value that numpy can convert, including torch tensors on the CPU.
        dtype: Dtype of the result.
        field: Name of the value for error messages.

    Raises:
        ValueError: The value is not one-dimensional or not numeric; or `dtype` is int32, and the value has floats or
            an integer that is out of range.
    """
    return number_array(value, dtype, field=field)


def matrix(value: Any, dtype: type[np.int32 | np.float32], *, field: str) -> npt.NDArray[Any]:
    """Convert lists, an array or a tensor to a two-dimensional array; see `vector`."""
    return number_array(value, dtype, dimensions=2, field=field)


def expert_indices(value: Any, *, field: str) -> npt.NDArray[Any]:
    """Convert lists, an array or a tensor to a three-dimensional array: uint8 if all values fit, otherwise int32.

    Raises:
        ValueError: The value does not have three dimensions, or contains floats or an integer outside int32.
    """
    array = number_array(value, np.int32, dimensions=3, field=field)
    return array.astype(np.uint8) if array.size and array.min() >= 0 and array.max() < 1 << 8 else array
