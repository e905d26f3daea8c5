"""Conversion of tensors between messages and numpy arrays, with all checks of tensor fields."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import DTYPE_NAMES, TensorData
from twinkle_services.kit.errors import InvalidField

_NAMES: dict[tensor_pb2.Dtype.ValueType, str] = {
    tensor_pb2.Dtype.Value(f'DTYPE_{name.upper()}'): name for name in DTYPE_NAMES
}
_NUMBERS = {name: number for number, name in _NAMES.items()}


def tensor_data_from_proto(tensor: tensor_pb2.Tensor, field: str) -> TensorData:
    """Return the checked bytes of a tensor with its dtype and shape.

    Args:
        tensor: Message to convert.
        field: Path of the tensor in the request, for errors.

    Raises:
        InvalidField: The dtype is unknown, or dtype, shape and data are inconsistent.
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
    """Return a checked tensor as a read-only array.

    Args:
        tensor: Message to convert.
        field: Path of the tensor in the request, for errors.
        dtypes: Names of the accepted dtypes.
        dimensions: Required number of dimensions.

    Raises:
        InvalidField: The dtype, the number of dimensions or the size of the data is wrong, or a value is not finite.
    """
    data = tensor_data_from_proto(tensor, field)
    accepted = tuple(dtypes)
    if data.dtype not in accepted:
        raise InvalidField(f'{field}.dtype', f'must be {" or ".join(accepted)}, got {data.dtype}')
    if len(data.shape) != dimensions:
        raise InvalidField(f'{field}.shape', f'must have {dimensions} dimension(s), got {len(data.shape)}')
    array = data.to_numpy()
    if array.dtype.kind == 'f' and not np.isfinite(array).all():
        raise InvalidField(field, 'must contain only finite numbers')
    return array


def tensor_to_proto(array: npt.NDArray[Any]) -> tensor_pb2.Tensor:
    """Return the message of `array`, with a copy of its data.

    Raises:
        ValueError: The contract has no such dtype.
    """
    return tensor_data_to_proto(TensorData.from_numpy(array))


def tensor_data_to_proto(tensor: TensorData) -> tensor_pb2.Tensor:
    """Return the message of `tensor`."""
    return tensor_pb2.Tensor(dtype=dtype_to_proto(tensor.dtype), shape=tensor.shape, data=bytes(tensor.data))


def dtype_from_proto(dtype: tensor_pb2.Dtype.ValueType, field: str) -> str:
    """Return the name of a dtype.

    Raises:
        InvalidField: The dtype is unset or unknown.
    """
    if dtype not in _NAMES:
        raise InvalidField(field, f'must be one of {", ".join(DTYPE_NAMES)}')
    return _NAMES[dtype]


def dtype_to_proto(name: str) -> tensor_pb2.Dtype.ValueType:
    """Return the number of a dtype in the contract."""
    return _NUMBERS[name]
