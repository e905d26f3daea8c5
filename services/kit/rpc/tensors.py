"""Tensors between their message and numpy, with every check a tensor field needs."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from services.kit.errors import InvalidField
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import DTYPE_NAMES, TensorData

_NAMES: dict[tensor_pb2.Dtype.ValueType, str] = {
    tensor_pb2.Dtype.Value(f'DTYPE_{name.upper()}'): name for name in DTYPE_NAMES
}
_NUMBERS = {name: number for number, name in _NAMES.items()}


def tensor_data_from_proto(tensor: tensor_pb2.Tensor, field: str) -> TensorData:
    """Return the tensor's bytes, checked.

    Args:
        tensor: the message.
        field: path of the tensor in the request, for errors.

    Raises:
        InvalidField: dtype, shape and data do not fit together.
    """
    if tensor.dtype not in _NAMES:
        raise InvalidField(f'{field}.dtype', f'must be one of {", ".join(DTYPE_NAMES)}')
    try:
        return TensorData(_NAMES[tensor.dtype], tuple(tensor.shape), tensor.data)
    except ValueError as error:
        raise InvalidField(field, str(error)) from error


def tensor_from_proto(
    tensor: tensor_pb2.Tensor, field: str, *, dtypes: Iterable[str], dimensions: int
) -> npt.NDArray[Any]:
    """Return the tensor as a read-only array, checked.

    Args:
        tensor: the message.
        field: path of the tensor in the request, for errors.
        dtypes: names of the dtypes that are welcome here.
        dimensions: number of dimensions it must have.

    Raises:
        InvalidField: another dtype or number of dimensions, bytes that do not fit, or a float that
            is infinite or not a number.
    """
    data = tensor_data_from_proto(tensor, field)
    welcome = tuple(dtypes)
    if data.dtype not in welcome:
        raise InvalidField(f'{field}.dtype', f'must be {" or ".join(welcome)}, got {data.dtype}')
    if len(data.shape) != dimensions:
        raise InvalidField(f'{field}.shape', f'must have {dimensions} dimension(s), got {len(data.shape)}')
    array = data.to_numpy()
    if array.dtype.kind == 'f' and not np.isfinite(array).all():
        raise InvalidField(field, 'must be finite everywhere')
    return array


def tensor_to_proto(array: npt.NDArray[Any]) -> tensor_pb2.Tensor:
    """Return `array` as a message (a copy).

    Raises:
        ValueError: the array's dtype has no name in the contract.
    """
    return tensor_data_to_proto(TensorData.from_numpy(array))


def tensor_data_to_proto(tensor: TensorData) -> tensor_pb2.Tensor:
    """Return `tensor` as a message."""
    return tensor_pb2.Tensor(dtype=dtype_to_proto(tensor.dtype), shape=tensor.shape, data=bytes(tensor.data))


def dtype_from_proto(dtype: tensor_pb2.Dtype.ValueType, field: str) -> str:
    """Return the name of a dtype.

    Raises:
        InvalidField: it is unset or unknown.
    """
    if dtype not in _NAMES:
        raise InvalidField(field, f'must be one of {", ".join(DTYPE_NAMES)}')
    return _NAMES[dtype]


def dtype_to_proto(name: str) -> tensor_pb2.Dtype.ValueType:
    """Return the number of a dtype."""
    return _NUMBERS[name]
