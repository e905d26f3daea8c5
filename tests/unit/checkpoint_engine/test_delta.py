"""Unit tests of deltas: encoding is lossless and deterministic, and damaged deltas are refused."""

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
    """Return two states with equal names, dtypes and shapes. No bytes, a tenth of the bytes or most bytes differ."""
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


def _apply(new: PackedState, base: PackedState, delta: bytes | memoryview) -> bytes:
    target = bytearray(new.manifest.size_bytes)
    apply_delta(new.manifest, base.data, delta, target)
    return bytes(target)


@given(pair=_pairs())
def test_delta_is_lossless_and_deterministic(pair: tuple[PackedState, PackedState]) -> None:
    """A base and a delta give the new state for all dtypes and shapes; encoding twice gives the same delta."""
    base, new = pair
    delta = encode_delta(new.manifest, new.data, base.data)
    assert encode_delta(new.manifest, new.data, base.data) == delta
    assert _apply(new, base, delta) == bytes(new.data)


def test_blocks_cover_a_state_and_share_small_tensors() -> None:
    """Blocks cover all bytes of a state; small tensors of equal element size share a block."""
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


def test_separately_encoded_blocks_form_the_delta() -> None:
    """The joined blocks equal the complete delta, so a sender can encode one block at a time."""
    base, new = _random_state(1, 3 * BLOCK_BYTES // 2), _random_state(2, 3 * BLOCK_BYTES // 2)
    parts = [
        encode_block(block, new.data[block.offset : block.end], base.data[block.offset : block.end])
        for block in delta_blocks(new.manifest)
    ]
    assert b''.join(parts) == encode_delta(new.manifest, new.data, base.data)


def test_small_changes_compress_well() -> None:
    """The delta of values that differ only in their last bits takes less than 0.4 of their size."""
    random = np.random.default_rng(0)
    old = random.normal(0, 0.02, 1 << 18).astype(np.float32)
    new = old + random.normal(0, 3e-5, old.size).astype(np.float32)
    base, state = (
        _state({'w': TensorData('bfloat16', (old.size,), (each.view(np.uint32) >> 16).astype('<u2').tobytes())})
        for each in (old, new)
    )
    delta = encode_delta(state.manifest, state.data, base.data)
    assert len(delta) < 0.4 * len(state.data)
    assert _apply(state, base, delta) == bytes(state.data)


def test_a_delta_requires_equal_tensors() -> None:
    """States that differ in a shape, dtype, name or base model have no delta."""
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
def test_a_damaged_delta_is_detected(data: st.DataObject) -> None:
    """A truncated or extended delta raises InvalidDelta; a modified delta may instead give bytes of the right size."""
    base, new = _random_state(1, 400), _random_state(2, 400)
    delta = bytearray(encode_delta(new.manifest, new.data, base.data))
    position = data.draw(st.integers(0, len(delta) - 1))
    kind = data.draw(st.sampled_from(['cut', 'flip', 'grow']))
    if kind == 'cut':
        del delta[position:]
    elif kind == 'flip':
        delta[position] ^= data.draw(st.integers(1, 255))
    else:
        delta += data.draw(st.binary(min_size=1, max_size=9))
    if kind != 'flip':
        with pytest.raises(InvalidDelta):
            _apply(new, base, bytes(delta))
        return
    with suppress(InvalidDelta):
        assert len(_apply(new, base, bytes(delta))) == new.manifest.size_bytes


@pytest.mark.parametrize('claimed', [1 << 40, 0])
def test_a_frame_with_a_false_size_is_refused(claimed: int) -> None:
    """A frame whose header has a wrong decompressed size is refused."""
    base = _random_state(1, 400)
    # A zstd frame: magic, descriptor with an eight-byte content size, window, size, one empty last block.
    frame = b'\x28\xb5\x2f\xfd' + b'\xc0\x00' + claimed.to_bytes(8, 'little') + b'\x01\x00\x00'
    with pytest.raises(InvalidDelta):
        _apply(base, base, b'\x01' + len(frame).to_bytes(4, 'little') + frame)
