"""Unit tests of packing, manifests, chunks and the assembler."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.checkpoint_engine import (
    Assembler,
    ChunkCorrupt,
    ChunkOutOfOrder,
    ChunkOutOfRange,
    DigestMismatch,
    InvalidManifest,
    InvalidPeftFolder,
    PackedState,
    StateChunk,
    StateIncomplete,
    StateSection,
    chunk_checksum,
    iter_chunks,
    pack_state,
    plan_state,
    state_digest,
    unpack_state,
)
from twinkle.checkpoint_engine.manifest import DTYPE_BYTES
from twinkle.data_format import DTYPE_NAMES, LoraConfig, TensorData

BASE_MODEL = 'org/tiny'


@st.composite
def tensors(draw: st.DrawFn, *, min_size: int = 0) -> dict[str, TensorData]:
    """Return a few small random tensors of any dtype, including empty tensors and scalars."""

    def tensor() -> TensorData:
        dtype = draw(st.sampled_from(DTYPE_NAMES))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        size = int(np.prod(shape, dtype=np.int64)) * DTYPE_BYTES[dtype]
        return TensorData(dtype, shape, draw(st.binary(min_size=size, max_size=size)))

    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=min_size, max_size=5, unique=True))
    return {name: tensor() for name in names if name != '__metadata__'} or {'w': tensor()}


def state_of(data: bytes) -> PackedState:
    """Return a state with one tensor that contains `data`."""
    tensor = TensorData('uint8', (len(data),), data)
    return pack_state({'w': tensor}, base_model=BASE_MODEL, lora_config=LoraConfig())


def test_dtype_bytes_cover_every_dtype() -> None:
    """`DTYPE_BYTES` has the element size of every dtype, and `TensorData` accepts a tensor of this size."""
    for name in DTYPE_NAMES:
        TensorData(name, (3,), bytes(3 * DTYPE_BYTES[name]))
    assert set(DTYPE_BYTES) == set(DTYPE_NAMES)


@given(adapter=tensors(min_size=1), trainer=tensors())
def test_unpack_restores_the_packed_tensors(adapter: dict[str, TensorData], trainer: dict[str, TensorData]) -> None:
    """Unpacking restores both sections bitwise, and needs only the adapter section's bytes to restore that section."""
    state = pack_state(adapter, base_model=BASE_MODEL, lora_config=LoraConfig(), trainer=trainer)
    head = state.data[: state.manifest.adapter_size_bytes]
    assert unpack_state(state.manifest, head) == adapter
    assert unpack_state(state.manifest, state.data, section=StateSection.TRAINER) == trainer
    assert state.manifest.is_trainer_included


@given(adapter=tensors(min_size=1), seed=st.randoms())
def test_packing_does_not_depend_on_the_order_of_tensors(adapter: dict[str, TensorData], seed: object) -> None:
    """Equal tensors in another order give an equal manifest and equal bytes."""
    names = list(adapter)
    seed.shuffle(names)  # type: ignore[attr-defined]
    first = pack_state(adapter, base_model=BASE_MODEL, lora_config=LoraConfig())
    copy = pack_state({name: adapter[name] for name in names}, base_model=BASE_MODEL, lora_config=LoraConfig())
    assert first == copy


@given(adapter=tensors(min_size=1), trainer=tensors())
def test_a_plan_has_the_digest_of_the_packed_state(
    adapter: dict[str, TensorData], trainer: dict[str, TensorData]
) -> None:
    """A plan has the parts, the digest and the manifest of the packed state."""
    plan = plan_state(adapter, base_model=BASE_MODEL, lora_config=LoraConfig(), trainer=trainer)
    assert plan.describe(plan.digest()) == plan.pack().manifest
    assert b''.join(plan.parts) == plan.pack().data


def test_plans_of_equal_parts_share_their_layout() -> None:
    """Plans of tensors with equal names, shapes and dtypes share one layout object."""
    first, second = (
        plan_state({'w': TensorData('uint8', (2,), data)}, base_model=BASE_MODEL, lora_config=LoraConfig()).pack()
        for data in (b'ab', b'cd')
    )
    assert first.manifest.layout is second.manifest.layout
    assert first.manifest.digest != second.manifest.digest
    other = pack_state({'w': TensorData('bool', (2,), b'ab')}, base_model=BASE_MODEL, lora_config=LoraConfig())
    assert other.manifest.tensors[0].dtype == 'bool'


def test_multithreaded_digests_are_equal() -> None:
    """Several threads compute the same digest of a large state as one thread."""
    data = bytes(range(256)) * (36 << 10)
    tensors = {
        str(n): TensorData('uint8', (len(data) // 4,), data[n * len(data) // 4 :][: len(data) // 4]) for n in range(4)
    }
    plan = plan_state(tensors, base_model=BASE_MODEL, lora_config=LoraConfig())
    assert plan.digest() == state_digest(data) == state_digest(memoryview(data))


def test_unpack_copies_nothing() -> None:
    """Unpacked tensors are views of the state's bytes."""
    state = state_of(b'abc')
    tensor = unpack_state(state.manifest, state.data)['w']
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.obj is state.data.obj


def test_pack_refuses_a_state_without_adapter_weights() -> None:
    """A state with only trainer tensors raises InvalidManifest."""
    with pytest.raises(InvalidManifest) as caught:
        pack_state({}, base_model=BASE_MODEL, lora_config=LoraConfig(), trainer={'t': TensorData('uint8', (), b'x')})
    assert caught.value.field == 'tensors'


def _two_sections() -> PackedState:
    adapter = {'a': TensorData('float32', (2,), bytes(8)), 'b': TensorData('uint8', (3,), bytes(3))}
    trainer = {'step': TensorData('int64', (), bytes(8))}
    return pack_state(adapter, base_model=BASE_MODEL, lora_config=LoraConfig(), trainer=trainer)


@pytest.mark.parametrize(
    ('index', 'change', 'field'),
    [
        (0, {'offset': 1}, 'tensors[0].offset'),
        (1, {'offset': 7}, 'tensors[1].offset'),
        (1, {'name': 'a'}, 'tensors[1].name'),
        (1, {'name': ''}, 'tensors[1].name'),
        (0, {'dtype': 'float8'}, 'tensors[0].dtype'),
        (0, {'shape': (-2,)}, 'tensors[0].shape'),
        (0, {'size_bytes': -8}, 'tensors[0].size_bytes'),
        (0, {'size_bytes': 4}, 'tensors[0].size_bytes'),
        (0, {'section': StateSection.TRAINER}, 'tensors[1].section'),
    ],
)
def test_manifest_refuses_inconsistent_entries(index: int, change: dict[str, object], field: str) -> None:
    """An inconsistent tensor entry raises an InvalidManifest that names the field."""
    manifest = _two_sections().manifest
    entries = list(manifest.tensors)
    entries[index] = dataclasses.replace(entries[index], **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidManifest) as caught:
        dataclasses.replace(manifest, tensors=tuple(entries))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ('change', 'field'),
    [({'base_model': ''}, 'base_model'), ({'digest': 'ab'}, 'digest'), ({'size_bytes': 20}, 'size_bytes')],
)
def test_manifest_refuses_wrong_totals(change: dict[str, object], field: str) -> None:
    """A wrong top-level field raises an InvalidManifest that names the field."""
    with pytest.raises(InvalidManifest) as caught:
        dataclasses.replace(_two_sections().manifest, **change)  # type: ignore[arg-type]
    assert caught.value.field == field


@given(data=st.binary(max_size=400), sizes=st.lists(st.integers(1, 90)))
def test_any_split_into_chunks_assembles(data: bytes, sizes: list[int]) -> None:
    """Chunks of any sizes give the original state."""
    state = state_of(data)
    assembler = Assembler(state.manifest)
    for size in [*sizes, 500]:
        chunk = next(iter_chunks(state.data, offset=assembler.next_offset, chunk_bytes=size), None)
        if chunk is not None:
            assembler.add(chunk)
    assert assembler.finish() == state


@given(data=st.binary(min_size=1, max_size=200), cut=st.integers(0, 200), chunk_bytes=st.integers(1, 64))
def test_a_transfer_cut_at_any_byte_resumes(data: bytes, cut: int, chunk_bytes: int) -> None:
    """A transfer continues at the byte where it was cut, and returns the state only at the end."""
    cut = min(cut, len(data))
    state = state_of(data)
    assembler = Assembler(state.manifest)
    for chunk in iter_chunks(state.data[:cut], chunk_bytes=chunk_bytes):
        assembler.add(chunk)
    assert assembler.next_offset == cut
    if cut < len(data):
        with pytest.raises(StateIncomplete):
            assembler.finish()
    for chunk in iter_chunks(state.data, offset=assembler.next_offset, chunk_bytes=chunk_bytes):
        assembler.add(chunk)
    assert assembler.finish().data == data


@given(data=st.binary(min_size=1, max_size=300), bit=st.integers(0), chunk_bytes=st.integers(1, 128))
def test_a_flipped_bit_is_always_detected(data: bytes, bit: int, chunk_bytes: int) -> None:
    """A chunk with a flipped bit is refused, and the correct chunk is accepted afterwards."""
    bit %= len(data) * 8
    state = state_of(data)
    assembler = Assembler(state.manifest)
    for chunk in iter_chunks(state.data, chunk_bytes=chunk_bytes):
        if chunk.offset <= bit // 8 < chunk.offset + len(chunk.data):
            bad = bytearray(chunk.data)
            bad[bit // 8 - chunk.offset] ^= 1 << bit % 8
            with pytest.raises(ChunkCorrupt):
                assembler.add(dataclasses.replace(chunk, data=bytes(bad)))
        assembler.add(chunk)
    assert assembler.finish() == state


@given(data=st.binary(min_size=1, max_size=300), bit=st.integers(0))
def test_corrupt_bytes_with_a_valid_checksum_are_detected(data: bytes, bit: int) -> None:
    """The digest of the state detects corrupt bytes whose chunk checksum matches."""
    bit %= len(data) * 8
    bad = bytearray(data)
    bad[bit // 8] ^= 1 << bit % 8
    assembler = Assembler(state_of(data).manifest)
    for chunk in iter_chunks(bytes(bad), chunk_bytes=50):
        assembler.add(chunk)
    with pytest.raises(DigestMismatch) as caught:
        assembler.finish()
    assert caught.value.actual == state_digest(bytes(bad))


def _chunk(offset: int, data: bytes) -> StateChunk:
    return StateChunk(offset, data, chunk_checksum(data))


def test_chunks_out_of_order_or_range_are_refused_and_change_nothing() -> None:
    """Chunks with a wrong offset or too many bytes are refused and do not change the assembled state."""
    state = state_of(b'0123456789')
    assembler = Assembler(state.manifest)
    assembler.add(_chunk(0, b'01234'))
    for offset in (0, 4, 6, -1):
        with pytest.raises(ChunkOutOfOrder) as caught:
            assembler.add(_chunk(offset, b'xx'))
        assert (caught.value.offset, caught.value.expected) == (offset, 5)
    with pytest.raises(ChunkOutOfRange):
        assembler.add(_chunk(5, b'567890'))
    assembler.add(_chunk(5, b'56789'))
    assert assembler.finish() == state


@settings(max_examples=30)
@given(data=st.binary(max_size=64))
def test_checksums_fit_a_signed_64_bit_field(data: bytes) -> None:
    """A checksum fits into a signed 64-bit integer."""
    assert -(1 << 63) <= chunk_checksum(data) < 1 << 63


@pytest.mark.parametrize(('offset', 'chunk_bytes'), [(-1, 1), (4, 1), (0, 0)])
def test_iter_chunks_refuses_bad_bounds(offset: int, chunk_bytes: int) -> None:
    """An offset outside the data, or a chunk size of 0, raises ValueError."""
    with pytest.raises(ValueError, match=r'offset|chunk_bytes'):
        list(iter_chunks(b'abc', offset=offset, chunk_bytes=chunk_bytes))


@pytest.mark.parametrize(
    'error',
    [
        InvalidManifest('digest', 'is wrong'),
        ChunkCorrupt(3),
        ChunkOutOfOrder(3, 4),
        ChunkOutOfRange(3, 9, 8),
        StateIncomplete(1, 2),
        DigestMismatch('a', 'b'),
        InvalidPeftFolder('adapter_config.json', 'is missing'),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled(error: Exception) -> None:
    """A pickled error has the same type, attributes and message."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), vars(copy), str(copy)) == (type(error), vars(error), str(error))
