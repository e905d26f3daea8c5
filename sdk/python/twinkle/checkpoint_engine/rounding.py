"""Conversion of weights to a different floating-point type, for example a narrower type for published weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from twinkle.checkpoint_engine.errors import WeightsOutOfRange
from twinkle.checkpoint_engine.float_bytes import FLOAT_DTYPES, from_float32, to_float32
from twinkle.data_format import TensorData

ROUNDED_DTYPES = ('float32', 'bfloat16', 'float16')
"""Supported target types."""

_MANTISSA_BITS = {'float16': 10, 'bfloat16': 7, 'float32': 23, 'float64': 52}
"""Number of stored bits of the mantissa, by type."""


@dataclass(frozen=True)
class RoundedTensors:
    """The result of `round_tensors`."""

    tensors: Mapping[str, TensorData]
    narrowed: frozenset[str]
    """Source types with more precision or range than the target type."""


def round_tensors(tensors: Mapping[str, TensorData], dtype: str) -> RoundedTensors:
    """Convert floating-point tensors to a given type, rounding to nearest even.

    Args:
        tensors: tensors to convert. Tensors of other types are returned unchanged.
        dtype: one of `ROUNDED_DTYPES`.

    Raises:
        WeightsOutOfRange: a number that is finite in float32 would become infinite.
    """
    changed = {name: _rounded(name, tensor, dtype) for name, tensor in tensors.items()}
    sources = {tensor.dtype for tensor in tensors.values() if tensor.dtype in FLOAT_DTYPES}
    narrowed = frozenset(source for source in sources if _is_narrower(dtype, source))
    return RoundedTensors(changed, narrowed)


def _is_narrower(dtype: str, source: str) -> bool:
    is_range_smaller = dtype == 'float16' and source != 'float16'
    return _MANTISSA_BITS[dtype] < _MANTISSA_BITS[source] or is_range_smaller


def _rounded(name: str, tensor: TensorData, dtype: str) -> TensorData:
    if tensor.dtype == dtype or tensor.dtype not in FLOAT_DTYPES:
        return tensor
    values = to_float32(tensor.data, tensor.dtype)
    data = from_float32(values, dtype)
    if np.isinf(to_float32(data, dtype)).sum() > np.isinf(values).sum():
        raise WeightsOutOfRange(name, dtype)
    return TensorData(dtype, tensor.shape, data)
