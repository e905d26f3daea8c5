"""Unit tests of `twinkle.data_format`: tensors, sampling parameters, LoRA configs, user data and samples."""

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.data_format import (
    LoraConfig,
    SampledSequence,
    SampleResponse,
    SampleResults,
    SamplingParams,
    StopReason,
    TensorData,
    pack_user_data,
    pack_value,
    user_data_get,
    user_data_values,
)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_tensor_survives_bytes(values: list[int]) -> None:
    """A tensor converted to bytes and back has the same dtype and values."""
    array = np.array(values, dtype=np.int32)
    back = TensorData.from_numpy(array).to_numpy()
    assert back.dtype == array.dtype
    assert back.tolist() == values


def test_tensor_in_fortran_order_is_written_in_c_order() -> None:
    """The bytes are in C order for every memory layout of the array."""
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert TensorData.from_numpy(array).to_numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_bfloat16_widens_exactly() -> None:
    """The bfloat16 values 1.5 and -2 convert to float32 exactly."""
    tensor = TensorData('bfloat16', (2,), np.array([0x3FC0, 0xC000], dtype='<u2').tobytes())
    assert tensor.to_numpy().tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ('dtype', 'shape', 'size'),
    [('int7', (1,), 1), ('int32', (2,), 7), ('int32', (-1,), 4), ('float32', (2, 0), 4)],
)
def test_inconsistent_tensor_is_refused(dtype: str, shape: tuple[int, ...], size: int) -> None:
    """An unknown dtype, a wrong number of bytes or a negative size raises ValueError."""
    with pytest.raises(ValueError, match=r'dtype|shape|bytes'):
        TensorData(dtype, shape, bytes(size))


@pytest.mark.parametrize(
    'values',
    [
        {'temperature': -1},
        {'temperature': float('nan')},
        {'top_p': 0},
        {'top_p': 1.1},
        {'top_k': 0},
        {'max_tokens': -1},
        {'num_samples': 0},
        {'repetition_penalty': 0},
        {'temprature': 1},
    ],
)
def test_sampling_params_out_of_range_are_refused(values: dict[str, float]) -> None:
    """An invalid sampling parameter raises a ValueError that names the field."""
    with pytest.raises(ValueError, match=next(iter(values))):
        SamplingParams.from_dict(values)


def test_stop_is_split_by_kind() -> None:
    """Stop strings and stop token ids may be mixed in `stop`."""
    params = SamplingParams(stop=['a', 7])
    assert (params.stop_strings, params.stop_token_ids) == (('a',), (7,))


def test_lora_config_reads_a_peft_like_object() -> None:
    """Fields that both classes have are copied, and the set of target modules is sorted."""

    class PeftLike:
        r = 4
        lora_alpha = 8
        target_modules = frozenset({'v_proj', 'q_proj'})
        bias = 'none'

    config = LoraConfig.of(PeftLike())
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 8, ('q_proj', 'v_proj'))


@pytest.mark.parametrize('values', [{'r': 0}, {'lora_dropout': 1.0}, {'lora_alpha': 0}, {'target_modules': ()}])
def test_lora_config_out_of_range_is_refused(values: dict[str, object]) -> None:
    """An invalid LoRA setting raises a ValueError that names the field."""
    with pytest.raises(ValueError, match=next(iter(values))):
        LoraConfig.of(values)


def test_user_data_is_read_by_key() -> None:
    """A packed value is found by its key, and a missing key gives the default."""
    row = {'user_data': [pack_value('target', 24), pack_value('nums', [1, 2])]}
    assert user_data_get(row, 'nums') == [1, 2]
    assert user_data_get(row, 'absent', 0) == 0


@pytest.mark.parametrize(
    'user_data',
    [
        pack_user_data({'target': 24, 'nums': [1, 2]}),
        pickle.loads(pickle.dumps(pack_user_data({'target': 24, 'nums': [1, 2]}))),
        json.loads(json.dumps(pack_user_data({'target': 24, 'nums': [1, 2]}))),
        [{'target': 24, 'nums': [1, 2]}],
        [{'target': 24}, ('nums', '[1, 2]'), ('target', '25')],
        {'target': 24, 'nums': [1, 2]},
        [('target', 24), ['nums', [1, 2]]],
    ],
)
def test_user_data_is_read_in_every_form(user_data: Any) -> None:
    """Pairs and mappings are equivalent; for a duplicate key, the first value is used."""
    assert user_data_values({'user_data': user_data}) == {'target': 24, 'nums': [1, 2]}


@pytest.mark.parametrize('user_data', [None, 7, 'target', [], [7, 'target', ()]])
def test_malformed_user_data_is_empty(user_data: Any) -> None:
    """User data without keys reads as an empty mapping."""
    assert user_data_values({'user_data': user_data}) == {}


def test_keys_of_user_data_keep_their_order() -> None:
    """Keys keep their original order; a duplicate key has its first position and value."""
    pairs = [['b', '1'], ['a', '2'], ['b', '3']]
    assert list(user_data_values({'user_data': pairs}).items()) == [('b', 1), ('a', 2)]


def test_packed_user_data_can_be_read_as_pairs_or_by_key() -> None:
    """Packed user data reads as pairs of key and JSON and through `get`, even after pickling and copying."""
    packed: Any = pack_user_data({'target': 24, 'nums': [1, 2]})
    for user_data in (packed, pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert dict(user_data) == {'target': '24', 'nums': '[1, 2]'}
        assert (user_data[0].get('nums'), user_data[1].get('target'), user_data[0].get('absent', 0)) == ([1, 2], 24, 0)


def test_sample_results_read_as_list_or_as_one_response() -> None:
    """Results iterate as one response per prompt, and give all sequences by attribute and by `get`."""
    sequences = [SampledSequence(stop_reason=StopReason.STOP, tokens=[token], decoded=str(token)) for token in range(3)]
    results = SampleResults([SampleResponse(sequences=sequences[:2]), SampleResponse(sequences=sequences[2:])])
    assert results.sequences == results.get('sequences') == sequences
    assert [sequence.get('tokens') for response in results for sequence in response.sequences] == [[0], [1], [2]]
    assert (results.get('absent', []), sequences[0].get('absent', 7)) == ([], 7)
    assert sequences[0].get('get') is sequences[0].get('__class__') is None
