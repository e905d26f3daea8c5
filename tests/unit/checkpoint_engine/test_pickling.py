"""States and tensors can be pickled. Ray and multiprocessing need this to pass them between processes."""

import pickle

import numpy as np
import pytest

from twinkle.checkpoint_engine import PackedState, pack_state, unpack_state
from twinkle.data_format import LoraConfig, TensorData


def _state() -> PackedState:
    values = np.arange(24, dtype=np.float32)
    weights = {'a': TensorData.from_numpy(values.reshape(4, 6)), 'b': TensorData.from_numpy(values[:3].astype('f2'))}
    return pack_state(weights, base_model='org/tiny', lora_config=LoraConfig(r=2, seed=1))


@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_state_is_equal(protocol: int) -> None:
    """A state and views of its tensors are equal after pickling, and the state's data remains read-only."""
    state = _state()
    for value in (state, unpack_state(state.manifest, state.data)):
        assert pickle.loads(pickle.dumps(value, protocol)) == value
    assert pickle.loads(pickle.dumps(state, protocol)).data.readonly


def test_pickled_bytes_are_transferred_out_of_band() -> None:
    """The transport receives the bytes of a state without a copy, and the restored state uses the received buffer."""
    state, buffers = _state(), list[pickle.PickleBuffer]()
    content = pickle.dumps(state, protocol=5, buffer_callback=buffers.append)
    (buffer,) = buffers
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), np.frombuffer(state.data, np.uint8))
    received = bytearray(buffer)
    restored = pickle.loads(content, buffers=[received])
    assert restored == state
    assert np.shares_memory(np.frombuffer(restored.data, np.uint8), np.frombuffer(received, np.uint8))
