"""Arrays as Tinker's clients send and read them, to and from numpy: as bytes, sparse, or as lists of JSON."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.gateway.http.fields import items, whole
from services.gateway.tinker.fields import Fields
from services.gateway.tinker.wire import tinker_pb2 as wire
from services.kit.errors import InvalidField

Array = npt.NDArray[Any]

MAX_ELEMENTS = 1 << 23
"""Of all sparse arrays of a request, once they are dense: a few bytes may claim any shape."""
_TYPES: dict[int, str] = {
    wire.DTYPE_FLOAT32: '<f4',
    wire.DTYPE_INT64: '<i8',
    wire.DTYPE_INT32: '<i4',
    wire.DTYPE_BFLOAT16: '<u2',
}
_NAMES = {'float32': '<f4', 'int64': '<i8'}
_DIMENSION = whole(0, 1 << 31)


class Room:
    """How much the sparse arrays of one request may still unfold to."""

    def __init__(self, elements: int = MAX_ELEMENTS) -> None:
        """Leave room for so many elements."""
        self._elements = elements

    def take(self, shape: tuple[int, ...] | None, field: str) -> tuple[int, ...]:
        """Return the shape of a matrix for which there is room.

        Raises:
            InvalidField: it is no shape of a matrix, or there is not enough room.
        """
        if shape is None or len(shape) != 2 or min(shape) < 0:
            raise InvalidField(field, 'a sparse tensor needs a shape of two dimensions')
        self._elements -= math.prod(shape)
        if self._elements < 0:
            raise InvalidField(field, f'sparse tensors of a request may stand for {MAX_ELEMENTS} elements together')
        return shape


def array_from_proto(tensor: wire.Tensor, field: str, room: Room) -> Array:
    """Return a tensor as float32 or int64, dense.

    Raises:
        InvalidField: type, shape and bytes do not fit together.
    """
    if tensor.dtype not in _TYPES:
        raise InvalidField(f'{field}.dtype', 'must be float32, int64, int32 or bfloat16')
    shape = tuple(tensor.shape) or None
    if tensor.HasField('sparse_csr'):
        sparse = tensor.sparse_csr
        rows, columns = (_elements(data, '<i8', field) for data in (sparse.crow_indices, sparse.col_indices))
        values = _widened(_elements(sparse.values, _TYPES[tensor.dtype], field), tensor.dtype)
        return _dense(values, (rows, columns), room.take(shape, field), field)
    if not tensor.HasField('dense'):
        raise InvalidField(field, 'has neither dense nor sparse data')
    return _shaped(_widened(_elements(tensor.dense, _TYPES[tensor.dtype], field), tensor.dtype), shape, field)


def array_from_json(value: Any, field: str, room: Room) -> Array:
    """Return a tensor given as an object of lists as float32 or int64, dense.

    Raises:
        InvalidField: it is none, or its fields do not fit together.
    """
    if not isinstance(value, dict):
        raise InvalidField(field, 'must be an object with data and dtype')
    fields = Fields(value, field)  # pyright: ignore[reportUnknownArgumentType]
    dtype = fields.need('dtype', _dtype_name)
    data = _numbers(fields.need('data', items), dtype, fields.path_of('data'))
    shape = tuple(fields.need('shape', _dimensions)) if 'shape' in fields else None
    if 'sparse_crow_indices' in fields or 'sparse_col_indices' in fields:
        rows, columns = (
            _numbers(fields.need(name, items), '<i8', fields.path_of(name))
            for name in ('sparse_crow_indices', 'sparse_col_indices')
        )
        return _dense(data, (rows, columns), room.take(shape, field), field)
    return _shaped(data, shape, field)


def array_to_json(array: Array) -> dict[str, Any]:
    """Return a tensor as an object of lists; null stands for what is no finite number, which JSON cannot tell."""
    name = 'float32' if array.dtype.kind == 'f' else 'int64'
    return {'data': finite(array.reshape(-1)), 'dtype': name, 'shape': list(array.shape)}


def finite(values: Array) -> list[float | None]:
    """Return numbers as JSON may have them; None where one is not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _dtype_name(value: Any, field: str) -> str:
    if not isinstance(value, str) or value not in _NAMES:
        raise InvalidField(field, f'must be one of {", ".join(_NAMES)}')
    return _NAMES[value]


def _dimensions(value: Any, field: str) -> list[int]:
    return [_DIMENSION(item, f'{field}[{place}]') for place, item in enumerate(items(value, field)[:3])]


def _numbers(values: Sequence[Any], dtype: str, field: str) -> Array:
    kinds = (int,) if dtype == '<i8' else (int, float)
    if any(type(value) not in kinds for value in values):
        raise InvalidField(field, f'must hold only {"integers" if dtype == "<i8" else "numbers"}')
    try:
        return np.array(values, dtype)
    except OverflowError as error:
        raise InvalidField(field, 'has a number that is too large') from error


def _elements(data: bytes, dtype: str, field: str) -> Array:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise InvalidField(field, f'must have a multiple of {size} bytes, got {len(data)}')
    return np.frombuffer(data, dtype)


def _widened(array: Array, dtype: int) -> Array:
    if dtype == wire.DTYPE_BFLOAT16:
        return (array.astype('<u4') << 16).view('<f4')
    return array.astype('<i8') if dtype == wire.DTYPE_INT32 else array


def _shaped(array: Array, shape: tuple[int, ...] | None, field: str) -> Array:
    if shape is None:
        return array
    if min(shape, default=0) < 0 or math.prod(shape) != array.size:
        raise InvalidField(field, f'has {array.size} elements, which is not the shape {list(shape)}')
    return array.reshape(shape)


def _dense(values: Array, places: tuple[Array, Array], shape: tuple[int, ...], field: str) -> Array:
    """Return the matrix of a sparse one; what is not listed is 0."""
    rows, columns = places
    counts = np.diff(rows)
    if len(rows) != shape[0] + 1 or rows[0] != 0 or rows[-1] != len(values) or (counts < 0).any():
        raise InvalidField(field, 'sparse_crow_indices must count from 0 to the number of values, once a row')
    if len(columns) != len(values) or ((columns < 0) | (columns >= shape[1])).any():
        raise InvalidField(field, 'sparse_col_indices must name a column for each value')
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense
