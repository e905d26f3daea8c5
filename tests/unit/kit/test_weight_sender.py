"""Sending a state: the encoding that costs least, from where a cut transfer ended, once for all who ask."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fixtures.checkpoint_service import make_state
from services.kit.errors import InvalidField
from services.kit.weights import (
    Base,
    Commit,
    Encoding,
    Header,
    HeldBytes,
    SegmentRef,
    Sender,
    VersionTarget,
    Wanted,
)
from services.kit.worker import Threads
from twinkle.checkpoint_engine import PackedState, StateChunk, pack_state, unpack_state
from twinkle.checkpoint_engine.delta import apply_delta
from twinkle.data_format import TensorData

DELTA = frozenset({Encoding.DELTA})
SHARED = frozenset({Encoding.DELTA, Encoding.SHARED_MEMORY})


class Counted(HeldBytes):
    """Notes what is read of a state, and whether it was closed."""

    def __init__(self, state: PackedState, *, segment: SegmentRef | None = None) -> None:
        """Hold `state`."""
        super().__init__(state.manifest, state.data, segment=segment)
        self.reads = 0
        self.is_closed = False

    async def read(self, offset: int, length: int) -> memoryview:
        """Count and let others run."""
        self.reads += 1
        await asyncio.sleep(0)
        return await super().read(offset, length)

    async def close(self) -> None:
        """Note it."""
        self.is_closed = True


@pytest.fixture
def sender() -> Iterator[Sender]:
    """A sender with threads of its own."""
    threads = Threads('send', count=2)
    yield Sender(threads)
    threads.close()


def near(state: PackedState, *, bit: int = 1) -> PackedState:
    """Return another state of the same tensors, nearly equal."""
    tensors = {name: bytearray(tensor.data) for name, tensor in unpack_state(state.manifest, state.data).items()}
    for data in tensors.values():
        data[::50] = bytes(byte ^ bit for byte in data[::50])
    changed = {
        entry.name: TensorData(entry.dtype, entry.shape, bytes(tensors[entry.name])) for entry in state.manifest.tensors
    }
    return pack_state(changed, base_model=state.manifest.base_model, lora_config=state.manifest.lora_config)


def unlike(state: PackedState) -> PackedState:
    """Return another state of the same tensors whose every bit is chance: states of real numbers share some."""
    chance = random.Random(9)
    tensors = {
        name: TensorData(tensor.dtype, tensor.shape, chance.randbytes(len(tensor.data)))
        for name, tensor in unpack_state(state.manifest, state.data).items()
    }
    return pack_state(tensors, base_model=state.manifest.base_model, lora_config=state.manifest.lora_config)


OLD = make_state(1, size_bytes=3 << 20)
NEW = near(OLD)


def base_of(state: PackedState, opened: list[Counted] | None = None) -> Base:
    """Return version 1 with the bytes of `state`; what is opened is added to `opened`."""

    async def open_base() -> Counted:
        source = Counted(state)
        if opened is not None:
            opened.append(source)
        return source

    return Base(1, open_base)


async def frames(sender: Sender, source: HeldBytes, **fields: Any) -> tuple[Header, bytes, Commit]:
    """Return the header, all bytes of the chunks, and the commit of version 2."""
    header = Header('ad', source.manifest, VersionTarget(2))
    return await collected(sender.frames(header, source, **fields))


async def collected(stream: AsyncIterator[Any]) -> tuple[Header, bytes, Commit]:
    """Return a stream's frames, its chunks put together."""
    header, *chunks, commit = [frame async for frame in stream]
    assert isinstance(header, Header)
    assert isinstance(commit, Commit)
    assert all(isinstance(chunk, StateChunk) for chunk in chunks)
    return header, b''.join(chunk.data for chunk in chunks), commit


async def test_holder_of_the_base_gets_a_delta_and_a_newcomer_the_whole(sender: Sender) -> None:
    """Only one that understands deltas, holds a base, and the same tensors at that."""
    header, data, commit = await frames(sender, Counted(NEW), wanted=Wanted(DELTA), base=base_of(OLD))
    assert (header.encoding, header.base_version, header.encoded_size_bytes) == (Encoding.DELTA, 1, len(data))
    assert len(data) < len(NEW.data) / 2
    target = bytearray(len(NEW.data))
    apply_delta(NEW.manifest, OLD.data, data, target)
    assert (bytes(target), commit.digest) == (bytes(NEW.data), NEW.manifest.digest)
    for fields in (
        {'wanted': Wanted(DELTA)},
        {'base': base_of(OLD)},
        {'wanted': Wanted(DELTA), 'base': base_of(make_state(1, size_bytes=64))},
    ):
        header, data, _ = await frames(sender, Counted(NEW), **fields)
        assert (header.encoding, header.encoded_digest, data) == (Encoding.WHOLE, '', bytes(NEW.data))


async def test_delta_is_not_used_where_it_saves_nothing(sender: Sender) -> None:
    """Bytes that have nothing in common are sent as they are."""
    other = unlike(OLD)
    header, data, _ = await frames(sender, Counted(other), wanted=Wanted(DELTA), base=base_of(OLD))
    # Compared here, and not by an assertion that would look for the difference of megabytes.
    is_same = data == bytes(other.data)
    assert (header.encoding, is_same) == (Encoding.WHOLE, True)


async def test_base_that_has_left_means_whole(sender: Sender) -> None:
    """The receiver holds what is here no more."""

    async def gone() -> None:
        return None

    header, _, _ = await frames(sender, Counted(NEW), wanted=Wanted(DELTA), base=Base(1, gone))
    assert header.encoding is Encoding.WHOLE


async def test_same_host_gets_the_segment(sender: Sender) -> None:
    """No bytes at all; another host, or one that does not ask for it, gets bytes."""
    ref = SegmentRef('here', 'segment', len(NEW.data))
    header, data, _ = await frames(sender, Counted(NEW, segment=ref), wanted=Wanted(SHARED, 'here'), base=base_of(OLD))
    assert (header.encoding, header.segment, data) == (Encoding.SHARED_MEMORY, ref, b'')
    for wanted in (Wanted(SHARED, 'elsewhere'), Wanted(DELTA, 'here'), Wanted(SHARED)):
        header, _, _ = await frames(sender, Counted(NEW, segment=ref), wanted=wanted)
        assert (header.encoding, header.segment) == (Encoding.WHOLE, None)


@pytest.mark.parametrize('cut', [1, 1000, 1 << 20, -1, None])
async def test_resumes_only_the_same_bytes(sender: Sender, cut: int | None) -> None:
    """At any byte of the same delta or state; anything else begins anew."""
    header, whole, _ = await frames(sender, Counted(NEW), wanted=Wanted(DELTA), base=base_of(OLD))
    offset = len(whole) if cut is None else cut % len(whole)
    wanted = Wanted(DELTA, resume_offset=offset, resume_digest=header.encoded_digest)
    resumed, tail, _ = await frames(sender, Counted(NEW), wanted=wanted, base=base_of(OLD))
    assert (resumed.resume_offset, tail) == (offset, whole[offset:])
    other_base = base_of(near(OLD, bit=2))
    anew, data, _ = await frames(sender, Counted(NEW), wanted=wanted, base=other_base)
    assert anew.resume_offset == 0
    assert len(data) == anew.encoded_size_bytes
    plain = Wanted(resume_offset=offset, resume_digest=header.encoded_digest)
    anew, data, _ = await frames(sender, Counted(NEW), wanted=plain)
    assert (anew.resume_offset, data) == (0, bytes(NEW.data))


async def test_offset_behind_the_end_is_refused_and_the_source_closed(sender: Sender) -> None:
    """With the field that holds it."""
    source = Counted(NEW)
    with pytest.raises(InvalidField) as caught:
        await frames(sender, source, wanted=Wanted(resume_offset=len(NEW.data) + 1), offset_field='offset')
    assert caught.value.field == 'offset'
    assert source.is_closed


async def test_many_subscribers_cost_one_encoding(sender: Sender) -> None:
    """Those who ask while it is made wait for it; those who ask later find it."""
    opened: list[Counted] = []
    asking = [frames(sender, Counted(NEW), wanted=Wanted(DELTA), base=base_of(OLD, opened)) for _ in range(8)]
    results = await asyncio.gather(*asking)
    results.append(await frames(sender, Counted(NEW), wanted=Wanted(DELTA), base=base_of(OLD, opened)))
    assert len({data for _, data, _ in results}) == 1
    assert sorted(source.reads > 0 for source in opened) == [False] * 8 + [True]
    assert all(source.is_closed for source in opened)


async def test_a_subscriber_that_leaves_does_not_take_the_encoding_along(sender: Sender) -> None:
    """Whoever waited for it makes it."""
    first, second = (
        asyncio.ensure_future(frames(sender, Counted(NEW), wanted=Wanted(DELTA), base=base_of(OLD))) for _ in range(2)
    )
    await asyncio.sleep(0)
    first.cancel()
    header, _, _ = await second
    assert header.encoding is Encoding.DELTA
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_weights_of_a_whole_model_are_sent_like_an_adapters(sender: Sender) -> None:
    """Their manifest has no LoRA configuration; the frames do not care."""
    tensors = {'model.norm.weight': TensorData('bfloat16', (1 << 10,), bytes(2 << 10))}
    changed = {'model.norm.weight': TensorData('bfloat16', (1 << 10,), b'\x01\x00' * (1 << 10))}
    old, new = (pack_state(each, base_model='org/m', lora_config=None) for each in (tensors, changed))
    header, data, _ = await frames(sender, Counted(new), wanted=Wanted(DELTA), base=base_of(old))
    assert (header.encoding, header.manifest.lora_config) == (Encoding.DELTA, None)
    target = bytearray(len(new.data))
    apply_delta(new.manifest, old.data, data, target)
    assert bytes(target) == bytes(new.data)
