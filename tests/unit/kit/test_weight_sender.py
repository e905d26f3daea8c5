"""The sender: choice of the encoding, resumed transfers, and shared encodings."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fixtures.checkpoint_service import make_state
from twinkle.checkpoint_engine import PackedState, StateChunk, pack_state, unpack_state
from twinkle.checkpoint_engine.delta import apply_delta
from twinkle.data_format import TensorData
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.weights import (
    Base,
    BytesInMemory,
    Commit,
    Encoding,
    Header,
    ReceiverOptions,
    SegmentRef,
    Sender,
    VersionTarget,
)
from twinkle_services.kit.worker import Threads

DELTA = frozenset({Encoding.DELTA})
SHARED = frozenset({Encoding.DELTA, Encoding.SHARED_MEMORY})


class CountedBytes(BytesInMemory):
    """Bytes of a state that count their reads and record whether they were closed."""

    def __init__(self, state: PackedState, *, segment: SegmentRef | None = None) -> None:
        super().__init__(state.manifest, state.data, segment=segment)
        self.reads = 0
        self.is_closed = False

    async def read(self, offset: int, length: int) -> memoryview:
        """Count the read and let other tasks run."""
        self.reads += 1
        await asyncio.sleep(0)
        return await super().read(offset, length)

    async def close(self) -> None:
        """Record that the state was closed."""
        self.is_closed = True


@pytest.fixture
def sender() -> Iterator[Sender]:
    """Return a sender with its threads."""
    threads = Threads('send', count=2)
    yield Sender(threads)
    threads.close()


def similar_state(state: PackedState, *, bit: int = 1) -> PackedState:
    """Return a nearly equal state with the same tensors."""
    tensors = {name: bytearray(tensor.data) for name, tensor in unpack_state(state.manifest, state.data).items()}
    for data in tensors.values():
        data[::50] = bytes(byte ^ bit for byte in data[::50])
    changed = {
        entry.name: TensorData(entry.dtype, entry.shape, bytes(tensors[entry.name])) for entry in state.manifest.tensors
    }
    return pack_state(changed, base_model=state.manifest.base_model, lora_config=state.manifest.lora_config)


def unrelated_state(state: PackedState) -> PackedState:
    """Return a random state with the same tensors; unlike real states, it has nothing in common with `state`."""
    generator = random.Random(9)
    tensors = {
        name: TensorData(tensor.dtype, tensor.shape, generator.randbytes(len(tensor.data)))
        for name, tensor in unpack_state(state.manifest, state.data).items()
    }
    return pack_state(tensors, base_model=state.manifest.base_model, lora_config=state.manifest.lora_config)


OLD = make_state(1, size_bytes=3 << 20)
NEW = similar_state(OLD)


def base_of(state: PackedState, opened: list[CountedBytes] | None = None) -> Base:
    """Return version 1 with the bytes of `state`; opened states are added to `opened`."""

    async def open_base() -> CountedBytes:
        source = CountedBytes(state)
        if opened is not None:
            opened.append(source)
        return source

    return Base(1, open_base)


async def frames(sender: Sender, source: BytesInMemory, **fields: Any) -> tuple[Header, bytes, Commit]:
    """Return the header, the concatenated data and the commit of version 2."""
    header = Header('ad', source.manifest, VersionTarget(2))
    return await collected(sender.frames(header, source, **fields))


async def collected(stream: AsyncIterator[Any]) -> tuple[Header, bytes, Commit]:
    """Return the header, the concatenated data and the commit of a stream."""
    header, *chunks, commit = [frame async for frame in stream]
    assert isinstance(header, Header)
    assert isinstance(commit, Commit)
    assert all(isinstance(chunk, StateChunk) for chunk in chunks)
    return header, b''.join(chunk.data for chunk in chunks), commit


async def test_receiver_with_the_base_gets_a_delta(sender: Sender) -> None:
    """A delta is sent only to a receiver that accepts deltas and has a base with the same tensors."""
    header, data, commit = await frames(sender, CountedBytes(NEW), receiver=ReceiverOptions(DELTA), base=base_of(OLD))
    assert (header.encoding, header.base_version, header.encoded_size_bytes) == (Encoding.DELTA, 1, len(data))
    assert len(data) < len(NEW.data) / 2
    target = bytearray(len(NEW.data))
    apply_delta(NEW.manifest, OLD.data, data, target)
    assert (bytes(target), commit.digest) == (bytes(NEW.data), NEW.manifest.digest)
    for fields in (
        {'receiver': ReceiverOptions(DELTA)},
        {'base': base_of(OLD)},
        {'receiver': ReceiverOptions(DELTA), 'base': base_of(make_state(1, size_bytes=64))},
    ):
        header, data, _ = await frames(sender, CountedBytes(NEW), **fields)
        assert (header.encoding, header.encoded_digest, data) == (Encoding.WHOLE, '', bytes(NEW.data))


async def test_delta_that_saves_nothing_is_not_used(sender: Sender) -> None:
    """Unrelated states are sent without a delta."""
    other = unrelated_state(OLD)
    header, data, _ = await frames(sender, CountedBytes(other), receiver=ReceiverOptions(DELTA), base=base_of(OLD))
    # Compare outside the assertion, because pytest would search megabytes for the difference.
    is_same = data == bytes(other.data)
    assert (header.encoding, is_same) == (Encoding.WHOLE, True)


async def test_missing_base_leads_to_a_whole_state(sender: Sender) -> None:
    """A state is sent without a delta if the sender no longer has the receiver's base."""

    async def missing_base() -> None:
        return None

    header, _, _ = await frames(sender, CountedBytes(NEW), receiver=ReceiverOptions(DELTA), base=Base(1, missing_base))
    assert header.encoding is Encoding.WHOLE


async def test_same_host_gets_the_segment(sender: Sender) -> None:
    """A receiver on the same host gets the segment, and other receivers get bytes."""
    ref = SegmentRef('here', 'segment', len(NEW.data))
    header, data, _ = await frames(
        sender, CountedBytes(NEW, segment=ref), receiver=ReceiverOptions(SHARED, 'here'), base=base_of(OLD)
    )
    assert (header.encoding, header.segment, data) == (Encoding.SHARED_MEMORY, ref, b'')
    for receiver in (ReceiverOptions(SHARED, 'elsewhere'), ReceiverOptions(DELTA, 'here'), ReceiverOptions(SHARED)):
        header, _, _ = await frames(sender, CountedBytes(NEW, segment=ref), receiver=receiver)
        assert (header.encoding, header.segment) == (Encoding.WHOLE, None)


@pytest.mark.parametrize('cut', [1, 1000, 1 << 20, -1, None])
async def test_transfer_resumes_only_for_the_same_bytes(sender: Sender, cut: int | None) -> None:
    """A transfer resumes at any byte of the same encoded bytes, and any other transfer starts over."""
    header, whole, _ = await frames(sender, CountedBytes(NEW), receiver=ReceiverOptions(DELTA), base=base_of(OLD))
    offset = len(whole) if cut is None else cut % len(whole)
    receiver = ReceiverOptions(DELTA, resume_offset=offset, resume_digest=header.encoded_digest)
    resumed, tail, _ = await frames(sender, CountedBytes(NEW), receiver=receiver, base=base_of(OLD))
    assert (resumed.resume_offset, tail) == (offset, whole[offset:])
    other_base = base_of(similar_state(OLD, bit=2))
    restarted, data, _ = await frames(sender, CountedBytes(NEW), receiver=receiver, base=other_base)
    assert restarted.resume_offset == 0
    assert len(data) == restarted.encoded_size_bytes
    plain = ReceiverOptions(resume_offset=offset, resume_digest=header.encoded_digest)
    restarted, data, _ = await frames(sender, CountedBytes(NEW), receiver=plain)
    assert (restarted.resume_offset, data) == (0, bytes(NEW.data))


async def test_offset_beyond_the_end_is_refused(sender: Sender) -> None:
    """An offset beyond the end is refused with an error that names its field, and the source is closed."""
    source = CountedBytes(NEW)
    with pytest.raises(InvalidField) as caught:
        await frames(sender, source, receiver=ReceiverOptions(resume_offset=len(NEW.data) + 1), offset_field='offset')
    assert caught.value.field == 'offset'
    assert source.is_closed


async def test_subscribers_share_one_encoding(sender: Sender) -> None:
    """Concurrent and later requests for the same delta use one encoding."""
    opened: list[CountedBytes] = []
    requests = [
        frames(sender, CountedBytes(NEW), receiver=ReceiverOptions(DELTA), base=base_of(OLD, opened)) for _ in range(8)
    ]
    results = await asyncio.gather(*requests)
    results.append(await frames(sender, CountedBytes(NEW), receiver=ReceiverOptions(DELTA), base=base_of(OLD, opened)))
    assert len({data for _, data, _ in results}) == 1
    assert sorted(source.reads > 0 for source in opened) == [False] * 8 + [True]
    assert all(source.is_closed for source in opened)


async def test_cancelled_subscriber_does_not_fail_the_others(sender: Sender) -> None:
    """A waiting subscriber encodes the delta if the first subscriber is cancelled."""
    first, second = (
        asyncio.ensure_future(frames(sender, CountedBytes(NEW), receiver=ReceiverOptions(DELTA), base=base_of(OLD)))
        for _ in range(2)
    )
    await asyncio.sleep(0)
    first.cancel()
    header, _, _ = await second
    assert header.encoding is Encoding.DELTA
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_states_of_whole_models_are_sent(sender: Sender) -> None:
    """A manifest without a LoRA configuration is sent like that of an adapter."""
    tensors = {'model.norm.weight': TensorData('bfloat16', (1 << 10,), bytes(2 << 10))}
    changed = {'model.norm.weight': TensorData('bfloat16', (1 << 10,), b'\x01\x00' * (1 << 10))}
    old, new = (pack_state(each, base_model='org/m', lora_config=None) for each in (tensors, changed))
    header, data, _ = await frames(sender, CountedBytes(new), receiver=ReceiverOptions(DELTA), base=base_of(old))
    assert (header.encoding, header.manifest.lora_config) == (Encoding.DELTA, None)
    target = bytearray(len(new.data))
    apply_delta(new.manifest, old.data, data, target)
    assert bytes(target) == bytes(new.data)
