"""Deltas: lossless for every content, the same bytes each time, and no harm from damaged ones."""

import math
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.checkpoint_engine import PackedState, pack_state
from twinkle.checkpoint_engine.delta import (
    BLOCK_BYTES,
    apply_delta,
    delta_blocks,
    encode_block,
    encode_delta,
    is_delta_possible,
)
from twinkle.checkpoint_engine.errors import InvalidDelta
from twinkle.data_format import LoraConfig, TensorData

_ITEM_BYTES = {'bool': 1, 'uint8': 1, 'float16': 2, 'bfloat16': 2, 'float32': 4, 'int32': 4, 'float64': 8, 'int64': 8}
_SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[PackedState, PackedState]:
    """Return two states of the same tensors: other bytes, few other bytes, or the same."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    kinds = draw(st.lists(st.tuples(st.sampled_from(sorted(_ITEM_BYTES)), _SHAPES), min_size=1, max_size=6))
    changed_share = draw(st.sampled_from([0.0, 0.1, 1.0]))
    old: dict[str, TensorData] = {}
    new: dict[str, TensorData] = {}
    for index, (dtype, shape) in enumerate(kinds):
        data = random.integers(0, 256, math.prod(shape) * _ITEM_BYTES[dtype], np.uint8)
        mask = random.random(len(data)) < changed_share
        other = np.where(mask, random.integers(0, 256, len(data), np.uint8), data).astype(np.uint8)
        old[f't{index}'] = TensorData(dtype, shape, data.tobytes())
        new[f't{index}'] = TensorData(dtype, shape, other.tobytes())
    return _state(old), _state(new)


def _state(tensors: dict[str, TensorData]) -> PackedState:
    return pack_state(tensors, base_model='org/m', lora_config=LoraConfig(r=1))


def _random_state(seed: int, count: int, *, dtype: str = 'bfloat16') -> PackedState:
    data = np.random.default_rng(seed).bytes(count * _ITEM_BYTES[dtype])
    return _state({'w': TensorData(dtype, (count,), data)})


def _applied(new: PackedState, base: PackedState, delta: bytes | memoryview) -> bytes:
    target = bytearray(new.manifest.size_bytes)
    apply_delta(new.manifest, base.data, delta, target)
    return bytes(target)


@given(pair=_pairs())
def test_delta_is_lossless_and_always_the_same(pair: tuple[PackedState, PackedState]) -> None:
    """Whatever dtypes, shapes and bytes: base and delta give the state, and encoding again gives the same delta."""
    base, new = pair
    delta = encode_delta(new.manifest, new.data, base.data)
    assert encode_delta(new.manifest, new.data, base.data) == delta
    assert _applied(new, base, delta) == bytes(new.data)


def test_blocks_cover_a_state_and_share_small_tensors() -> None:
    """Tensors of one element size lie in common blocks, large ones in several; nothing is left out."""
    tensors = {f's{index}': TensorData('float32', (3,), bytes(12)) for index in range(100)}
    tensors['big'] = TensorData('bfloat16', (BLOCK_BYTES,), bytes(2 * BLOCK_BYTES))
    manifest = _state(tensors).manifest
    blocks = list(delta_blocks(manifest))
    assert [(block.size_bytes, block.item_bytes) for block in blocks] == [
        (1200, 4),
        (BLOCK_BYTES, 2),
        (BLOCK_BYTES, 2),
    ]
    assert [block.offset for block in blocks[1:]] == [block.end for block in blocks[:-1]]
    assert blocks[-1].end == manifest.size_bytes


def test_blocks_encoded_apart_are_the_delta() -> None:
    """A sender needs one block of each state in memory at a time."""
    base, new = _random_state(1, 3 * BLOCK_BYTES // 2), _random_state(2, 3 * BLOCK_BYTES // 2)
    parts = [
        encode_block(block, new.data[block.offset : block.end], base.data[block.offset : block.end])
        for block in delta_blocks(new.manifest)
    ]
    assert b''.join(parts) == encode_delta(new.manifest, new.data, base.data)


def test_small_steps_cost_little() -> None:
    """Numbers that move by about their last place, as weights in training do, need well under half their bytes."""
    random = np.random.default_rng(0)
    old = random.normal(0, 0.02, 1 << 18).astype(np.float32)
    new = old + random.normal(0, 3e-5, old.size).astype(np.float32)
    base, state = (
        _state({'w': TensorData('bfloat16', (old.size,), (each.view(np.uint32) >> 16).astype('<u2').tobytes())})
        for each in (old, new)
    )
    delta = encode_delta(state.manifest, state.data, base.data)
    assert len(delta) < 0.4 * len(state.data)
    assert _applied(state, base, delta) == bytes(state.data)


def test_other_tensors_allow_no_delta() -> None:
    """Another shape, dtype, name or base model: the state has to be sent whole."""
    manifest = _random_state(1, 8).manifest
    assert is_delta_possible(manifest, _random_state(2, 8).manifest)
    assert not is_delta_possible(manifest, _random_state(1, 9).manifest)
    assert not is_delta_possible(manifest, _random_state(1, 8, dtype='float16').manifest)
    other_name = _state({'v': TensorData('bfloat16', (8,), bytes(16))})
    assert not is_delta_possible(manifest, other_name.manifest)
    tensor = {'w': TensorData('bfloat16', (8,), bytes(16))}
    other_model = pack_state(tensor, base_model='org/other', lora_config=LoraConfig(r=1))
    assert not is_delta_possible(manifest, other_model.manifest)


@given(data=st.data())
def test_damaged_delta_is_refused_or_leads_elsewhere_but_never_harms(data: st.DataObject) -> None:
    """Cut, longer, or with any byte changed: an InvalidDelta, or bytes whose digest will tell."""
    base, new = _random_state(1, 400), _random_state(2, 400)
    delta = bytearray(encode_delta(new.manifest, new.data, base.data))
    place = data.draw(st.integers(0, len(delta) - 1))
    kind = data.draw(st.sampled_from(['cut', 'flip', 'grow']))
    if kind == 'cut':
        del delta[place:]
    elif kind == 'flip':
        delta[place] ^= data.draw(st.integers(1, 255))
    else:
        delta += data.draw(st.binary(min_size=1, max_size=9))
    if kind != 'flip':
        with pytest.raises(InvalidDelta):
            _applied(new, base, bytes(delta))
        return
    with suppress(InvalidDelta):
        assert len(_applied(new, base, bytes(delta))) == new.manifest.size_bytes


@pytest.mark.parametrize('claimed', [1 << 40, 0])
def test_a_frame_that_claims_another_size_is_refused_before_memory_is_taken(claimed: int) -> None:
    """A few bytes that say they unpack to a terabyte, or to nothing, are refused unread."""
    base = _random_state(1, 400)
    # A zstd frame: magic, descriptor with an eight-byte content size, window, size, one empty last block.
    frame = b'\x28\xb5\x2f\xfd' + b'\xc0\x00' + claimed.to_bytes(8, 'little') + b'\x01\x00\x00'
    with pytest.raises(InvalidDelta):
        _applied(base, base, b'\x01' + len(frame).to_bytes(4, 'little') + frame)
