"""Weights in another element type: rounded to nearest even, never silently to infinity."""

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
def test_float16_is_what_numpy_rounds_to(values: list[float]) -> None:
    """Numpy rounds to nearest even."""
    rounded = round_tensors({'w': _tensor(values)}, 'float16')
    assert bytes(rounded.tensors['w'].data) == np.array(values, np.float32).astype('<f2').tobytes()
    assert rounded.narrowed == {'float32'}


@given(values=st.lists(_NUMBERS, min_size=1, max_size=20))
def test_bfloat16_is_the_nearest_of_its_neighbours(values: list[float]) -> None:
    """No other bfloat16 is nearer; of two that are as near, the even one is taken."""
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


def test_wider_types_lose_nothing_and_warn_of_nothing() -> None:
    """And what has the type already, or is no floating-point number, stays the very same."""
    half = TensorData('bfloat16', (2,), b'\x80\x3f\x00\xc0')
    count = TensorData('int64', (1,), bytes(8))
    rounded = round_tensors({'w': half, 'n': count}, 'float32')
    assert rounded.narrowed == frozenset()
    assert rounded.tensors['w'].to_numpy().tolist() == [1.0, -2.0]
    assert rounded.tensors['n'] is count
    assert round_tensors({'w': half}, 'bfloat16').tensors['w'] is half


def test_numbers_beyond_float16_are_refused() -> None:
    """With the tensor's name; bfloat16 has place for them, and infinities stay what they are."""
    with pytest.raises(WeightsOutOfRange) as caught:
        round_tensors({'big': _tensor([1e6])}, 'float16')
    assert (caught.value.name, caught.value.dtype) == ('big', 'float16')
    assert round_tensors({'big': _tensor([1e6])}, 'bfloat16').narrowed == {'float32'}
    assert round_tensors({'w': _tensor([np.inf])}, 'float16').tensors['w'].to_numpy().tolist() == [np.inf]
