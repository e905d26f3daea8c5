"""Conversion of Tinker's arrays to and from numpy: dense bytes, sparse matrices, and JSON lists.

Functions raise InvalidField with the path of the first wrong field.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainValidator

from twinkle_services.gateway.http.validation import MAX_TOKEN_ID, read_model
from twinkle_services.gateway.tinker.bodies import TinkerModel
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire
from twinkle_services.kit.errors import InvalidField

Array = npt.NDArray[Any]

MAX_ELEMENTS = 1 << 23
"""Maximum number of elements of all expanded sparse arrays of a request; a few bytes can declare any shape."""
_TYPES: dict[int, str] = {
    wire.DTYPE_FLOAT32: '<f4',
    wire.DTYPE_INT64: '<i8',
    wire.DTYPE_INT32: '<i4',
    wire.DTYPE_BFLOAT16: '<u2',
}
_NAMES = {'float32': '<f4', 'int64': '<i8'}
_INTEGERS, _NUMBERS = frozenset({int}), frozenset({int, float})
_SLICE = 1 << 18
"""Number of elements that are checked or converted in one step, which holds the interpreter's lock for 10 to 20 ms."""


class ElementBudget:
    """Remaining number of elements for the expanded sparse arrays of one request."""

    def __init__(self, elements: int = MAX_ELEMENTS) -> None:
        self._limit = self._elements = elements

    def take(self, shape: tuple[int, ...] | None, field: str) -> tuple[int, ...]:
        """Subtract the elements of a matrix from the budget, and return its shape."""
        if shape is None or len(shape) != 2 or min(shape) < 0:
            raise InvalidField(field, 'a sparse tensor needs a shape of two dimensions')
        self._elements -= math.prod(shape)
        if self._elements < 0:
            raise InvalidField(field, f'the sparse tensors of a request may have {self._limit} elements in total')
        return shape


def _number_list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not _has_only(_NUMBERS, cast('list[Any]', value)):
        raise ValueError('must be a list of numbers')
    return cast('list[Any]', value)


def _token_array(value: Any) -> Array:
    if not isinstance(value, list) or not _has_only(_INTEGERS, cast('list[Any]', value)):
        raise ValueError('must be a list of token ids')
    try:
        tokens = _converted(cast('list[Any]', value), '<i8')
    except OverflowError as error:
        raise ValueError(f'token ids must be at least 0 and at most {MAX_TOKEN_ID}') from error
    if tokens.size and (tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID):
        raise ValueError(f'token ids must be at least 0 and at most {MAX_TOKEN_ID}')
    return tokens


NumberList = Annotated[list[Any], PlainValidator(_number_list)]
TokenArray = Annotated[Array, PlainValidator(_token_array)]
"""List of token ids as an int64 array."""


class TensorBody(TinkerModel):
    """Tensor in JSON: dense, or a matrix in compressed sparse row (CSR) form."""

    dtype: Literal['float32', 'int64']
    data: NumberList
    shape: list[Annotated[int, Field(ge=0, le=1 << 31)]] | None = Field(default=None, max_length=32, fail_fast=True)
    sparse_crow_indices: NumberList | None = None
    sparse_col_indices: NumberList | None = None


def array_from_proto(tensor: wire.Tensor, field: str, budget: ElementBudget) -> Array:
    """Convert a tensor to a dense float32 or int64 array."""
    if tensor.dtype not in _TYPES:
        raise InvalidField(f'{field}.dtype', 'must be float32, int64, int32 or bfloat16')
    shape = tuple(tensor.shape) or None
    if tensor.HasField('sparse_csr'):
        sparse = tensor.sparse_csr
        rows, columns = (_elements(data, '<i8', field) for data in (sparse.crow_indices, sparse.col_indices))
        values = _widened(_elements(sparse.values, _TYPES[tensor.dtype], field), tensor.dtype)
        return _dense(values, (rows, columns), budget.take(shape, field), field)
    if not tensor.HasField('dense'):
        raise InvalidField(field, 'has neither dense nor sparse data')
    return _shaped(_widened(_elements(tensor.dense, _TYPES[tensor.dtype], field), tensor.dtype), shape, field)


def array_from_json(value: Any, field: str, budget: ElementBudget, *, missing: int = 0) -> Array:
    """Convert a JSON tensor to a dense float32 or int64 array; `missing` is the value of elements that it omits."""
    tensor = read_model(TensorBody, value, path=field)
    data = _array(tensor.data, _NAMES[tensor.dtype], f'{field}.data')
    shape = None if tensor.shape is None else tuple(tensor.shape)
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        return _shaped(data, shape, field)
    rows = _indices(tensor.sparse_crow_indices, f'{field}.sparse_crow_indices')
    columns = _indices(tensor.sparse_col_indices, f'{field}.sparse_col_indices')
    return _dense(data, (rows, columns), budget.take(shape, field), field, missing=missing)


def array_to_json(array: Array) -> dict[str, Any]:
    """Return a JSON tensor; numbers that are not finite become null."""
    name = 'float32' if array.dtype.kind == 'f' else 'int64'
    return {'data': finite(array.reshape(-1)), 'dtype': name, 'shape': list(array.shape)}


def finite(values: Array) -> list[float | None]:
    """Return numbers for JSON; None replaces numbers that are not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _array(values: list[Any], dtype: str, field: str) -> Array:
    if dtype == '<i8' and not _has_only(_INTEGERS, values):
        raise InvalidField(field, 'must contain only integers')
    try:
        return _converted(values, dtype)
    except OverflowError as error:
        raise InvalidField(field, 'has a number that is too large') from error


def _has_only(types: frozenset[type], values: list[Any]) -> bool:
    # There is no Python loop over the elements, because a request may have millions of them.
    return all(types.issuperset(map(type, part)) for part in _slices(values))


def _converted(values: list[Any], dtype: str) -> Array:
    parts = [np.array(part, dtype) for part in _slices(values)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.array([], dtype)])


def _slices(values: list[Any]) -> Iterator[list[Any]]:
    for begin in range(0, len(values), _SLICE):
        yield values[begin : begin + _SLICE]


def _indices(values: list[Any] | None, field: str) -> Array:
    if values is None:
        raise InvalidField(field, 'is required')
    return _array(values, '<i8', field)


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
        raise InvalidField(field, f'has {array.size} elements, which does not match the shape {list(shape)}')
    return array.reshape(shape)


def _dense(
    values: Array, indices: tuple[Array, Array], shape: tuple[int, ...], field: str, *, missing: int = 0
) -> Array:
    rows, columns = indices
    counts = np.diff(rows)
    if len(rows) != shape[0] + 1 or rows[0] != 0 or rows[-1] != len(values) or (counts < 0).any():
        raise InvalidField(field, 'sparse_crow_indices needs rows + 1 numbers that rise from 0 to the number of values')
    if len(columns) != len(values) or ((columns < 0) | (columns >= shape[1])).any():
        raise InvalidField(field, 'sparse_col_indices must give a column within the shape for each value')
    dense = np.full(shape, missing, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense
