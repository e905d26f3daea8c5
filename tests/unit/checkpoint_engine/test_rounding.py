"""Unit tests of `round_tensors`: rounding to nearest even, and refusal of values out of range."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.checkpoint_engine.errors import WeightsOutOfRange
from twinkle.checkpoint_engine.float_bytes import to_float32
from twinkle.checkpoint_engine.rounding import round_tensors
from twinkle.data_format import TensorData

_NUMBERS = st.floats(-60_000, 60_000, width=32)


def _tensor(values: list[float]) -> TensorData:
    return TensorData.from_numpy(np.array(values, np.float32))


@given(values=st.lists(_NUMBERS, min_size=1, max_size=20))
def test_float16_equals_numpys_rounding(values: list[float]) -> None:
    """Rounding to float16 equals numpy's rounding to nearest even."""
    rounded = round_tensors({'w': _tensor(values)}, 'float16')
    assert bytes(rounded.tensors['w'].data) == np.array(values, np.float32).astype('<f2').tobytes()
    assert rounded.narrowed == {'float32'}


@given(values=st.lists(_NUMBERS, min_size=1, max_size=20))
def test_bfloat16_is_the_nearest_value(values: list[float]) -> None:
    """Rounding to bfloat16 gives the nearest value, or the even value if two values are equally near."""
    rounded = round_tensors({'w': _tensor(values)}, 'bfloat16').tensors['w']
    bits = np.frombuffer(rounded.data, '<u2').astype(np.int64)
    exact = np.array(values, np.float32).astype(np.float64)
    distance = np.abs(_values(bits) - exact)
    for step in (-1, 1):
        neighbour = np.abs(_values(np.clip(bits + step, 0, 0xFFFF)) - exact)
        is_beyond = ~np.isfinite(neighbour)
        assert (is_beyond | (distance < neighbour) | ((distance == neighbour) & (bits % 2 == 0))).all()


def _values(bits):
    return to_float32(bits.astype('<u2').tobytes(), 'bfloat16').astype(np.float64)


def test_widening_is_exact() -> None:
    """Conversion to a wider type is exact and reports no narrowed types; other tensors are returned unchanged."""
    half = TensorData('bfloat16', (2,), b'\x80\x3f\x00\xc0')
    count = TensorData('int64', (1,), bytes(8))
    rounded = round_tensors({'w': half, 'n': count}, 'float32')
    assert rounded.narrowed == frozenset()
    assert rounded.tensors['w'].to_numpy().tolist() == [1.0, -2.0]
    assert rounded.tensors['n'] is count
    assert round_tensors({'w': half}, 'bfloat16').tensors['w'] is half


def test_numbers_beyond_float16_are_refused() -> None:
    """Finite values beyond float16's range raise WeightsOutOfRange with the tensor's name; infinities are kept."""
    with pytest.raises(WeightsOutOfRange) as caught:
        round_tensors({'big': _tensor([1e6])}, 'float16')
    assert (caught.value.name, caught.value.dtype) == ('big', 'float16')
    assert round_tensors({'big': _tensor([1e6])}, 'bfloat16').narrowed == {'float32'}
    assert round_tensors({'w': _tensor([np.inf])}, 'float16').tensors['w'].to_numpy().tolist() == [np.inf]
