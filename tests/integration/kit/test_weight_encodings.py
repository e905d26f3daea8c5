"""Tests of deltas and shared memory between client and service, and of the fallback to plain bytes."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fixtures.checkpoint_service import make_state
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2_grpc, weights_pb2
from twinkle.checkpoint_engine import PackedState, iter_chunks, pack_state, state_digest, unpack_state
from twinkle.checkpoint_engine.delta import encode_delta
from twinkle_services.kit.config import ServiceConfig
from twinkle_services.kit.errors import DomainError, Draining, InvalidField, MemoryNotShared
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.server import Endpoint, RpcServer
from twinkle_services.kit.weights import Encoding, Segments
from twinkle_services.kit.weights.wire import ReceivedState, WeightClient, chunk_to_proto, manifest_to_proto

DELTA = weights_pb2.FRAME_ENCODING_DELTA_XOR_ZSTD
SHARED = weights_pb2.FRAME_ENCODING_SHARED_MEMORY
CHUNK = 1 << 10


def similar(state: PackedState, seed: int) -> PackedState:
    """Return a copy of a state in which the two lowest bits of each byte are changed at random."""
    bits = np.random.default_rng(seed).integers(0, 4, len(state.data), np.uint8)
    tensors = unpack_state(state.manifest, (np.frombuffer(state.data, np.uint8) ^ bits).tobytes())
    return pack_state(tensors, base_model=state.manifest.base_model, lora_config=state.manifest.lora_config)


FIRST = make_state(1, size_bytes=40_000)
SECOND = similar(FIRST, 3)
THIRD = similar(FIRST, 5)
DELTA_BYTES = encode_delta(SECOND.manifest, SECOND.data, FIRST.data)


class FakeConfig(ServiceConfig):
    """Configuration of the fake checkpoint service."""

    service = 'checkpoint'


Script = Callable[[Any], list[Any]]


@dataclass
class FakeStreams(weight_stream_service_pb2_grpc.WeightStreamServiceServicer):
    """A servicer that sends scripted frames, and records the requests."""

    script: list[Script]
    requests: list[Any] = field(default_factory=list[Any])
    published: list[list[Any]] = field(default_factory=list[list[Any]])
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Send the next part of the script; the last part stays open."""
        for item in self._next(request):
            yield wire.SubscribeResponse(frame=item)
        if not self.script:
            await asyncio.Event().wait()

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Send the next part of the script."""
        for item in self._next(request):
            yield wire.FetchResponse(frame=item)

    async def Publish(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        """Receive all frames; the next part of the script may refuse them."""
        self.published.append([])
        async for request in request_iterator:
            self.published[-1].append(request.frame)
            self.started.set()
        list(self._next(self.published[-1][0].header))
        return wire.PublishResponse(version=weights_pb2.AdapterVersion(version=1))

    def _next(self, request: Any) -> list[Any]:
        self.requests.append(request)
        items = self.script.pop(0)(request)
        for item in items:
            if isinstance(item, DomainError):
                return _raising(items)
        return items


def _raising(items: list[Any]) -> Any:
    for item in items:
        if isinstance(item, DomainError):
            raise item
        yield item


@asynccontextmanager
async def client_of(fake: FakeStreams, segments: Segments | None = None) -> AsyncIterator[WeightClient]:
    """Serve the fake, and yield a client that is connected to it."""
    endpoint = Endpoint(
        wire.DESCRIPTOR.services_by_name['WeightStreamService'],
        fake,
        weight_stream_service_pb2_grpc.add_WeightStreamServiceServicer_to_server,
    )
    server = RpcServer(FakeConfig(), authenticator=InternalAuthenticator(''), endpoints=[endpoint])
    await server.start()
    channel: grpc.aio.Channel = open_channel(server.address)
    try:
        yield WeightClient(channel, attempts=3, segments=segments)
    finally:
        await channel.close()
        await server.stop(timedelta())


def frames(state: PackedState, encoded: bytes | memoryview, *, offset: int = 0, **header: Any) -> list[Any]:
    """Return the frames of an encoded state, starting at byte `offset`."""
    fields = {'encoding': weights_pb2.FRAME_ENCODING_WHOLE, **header}
    message = weights_pb2.FrameHeader(
        manifest=manifest_to_proto(state.manifest),
        encoded_size_bytes=len(encoded),
        resume_offset=offset,
        **fields,  # type: ignore[arg-type]
    )
    chunks = iter_chunks(encoded, offset=offset, chunk_bytes=CHUNK)
    return [
        weights_pb2.WeightFrame(header=message),
        *(weights_pb2.WeightFrame(chunk=chunk_to_proto(chunk)) for chunk in chunks),
        weights_pb2.WeightFrame(commit=weights_pb2.FrameCommit(digest=state.manifest.digest)),
    ]


def whole(state: PackedState, version: int, *, offset: int = 0) -> list[Any]:
    """Return the frames of a complete version."""
    return frames(state, state.data, offset=offset, version=weights_pb2.VersionTarget(version=version))


def delta(state: PackedState, version: int, data: bytes = DELTA_BYTES, *, offset: int = 0, base: int = 1) -> list[Any]:
    """Return the frames of a version as a delta."""
    fields: dict[str, Any] = {'encoding': DELTA, 'base_version': base, 'encoded_digest': state_digest(data)}
    return frames(state, data, offset=offset, version=weights_pb2.VersionTarget(version=version), **fields)


def shared(state: PackedState, version: int, segment: weights_pb2.SharedSegment) -> list[Any]:
    """Return the frames of a version in a segment."""
    target = weights_pb2.VersionTarget(version=version)
    return frames(state, b'', version=target, encoding=SHARED, segment=segment)


async def follow_states(client: WeightClient, count: int) -> list[ReceivedState]:
    """Return the states among the first `count` events that a follower receives."""
    async with aclosing(client.follow('ad-1')) as events:
        states = [await anext(events) for _ in range(count)]
    return [state for state in states if isinstance(state, ReceivedState)]


async def test_follower_receives_deltas_after_the_first_version() -> None:
    """A follower receives later versions as deltas, bitwise equal to the published states."""
    fake = FakeStreams([lambda request: [*whole(FIRST, 1), *delta(SECOND, 2)]])
    async with client_of(fake) as client:
        first, second = await follow_states(client, 2)
    assert (first.state, second.state) == (FIRST, SECOND)
    assert (first.encoding, second.encoding) == (Encoding.WHOLE, Encoding.DELTA)
    assert second.wire_size_bytes == len(DELTA_BYTES)
    assert list(fake.requests[0].accepted_encodings) == [DELTA]


@pytest.mark.parametrize('frame_count', range(1, 2 + len(DELTA_BYTES) // CHUNK))
async def test_interrupted_delta_resumes_at_the_encoded_byte(frame_count: int) -> None:
    """A delta can be interrupted after any frame, and the next request identifies the received bytes."""
    fake = FakeStreams(
        [
            lambda request: [*whole(FIRST, 1), *delta(SECOND, 2)[:frame_count], Draining()],
            lambda request: delta(SECOND, 2, offset=request.resume_offset),
        ]
    )
    async with client_of(fake) as client:
        assert (await follow_states(client, 2))[1].state == SECOND
    request = fake.requests[1]
    received_bytes = min((frame_count - 1) * CHUNK, len(DELTA_BYTES))
    assert (request.held_version, request.resume_version, request.resume_offset) == (1, 2, received_bytes)
    assert request.resume_digest == state_digest(DELTA_BYTES)


async def test_different_delta_after_an_interruption_starts_over() -> None:
    """The received bytes of one delta are never continued with those of another delta."""
    other = encode_delta(THIRD.manifest, THIRD.data, FIRST.data)
    fake = FakeStreams(
        [
            lambda request: [*whole(FIRST, 1), *delta(SECOND, 2)[:3], Draining()],
            lambda request: delta(THIRD, 3, other, offset=request.resume_offset),
            lambda request: delta(THIRD, 3, other, offset=request.resume_offset),
        ]
    )
    async with client_of(fake) as client:
        assert (await follow_states(client, 2))[1].state == THIRD
    assert fake.requests[2].resume_offset == 0


@pytest.mark.parametrize(
    'broken_delta',
    [
        lambda: delta(SECOND, 2, encode_delta(SECOND.manifest, SECOND.data, THIRD.data)),  # encoded from another base
        lambda: delta(SECOND, 2, DELTA_BYTES[:-9]),  # truncated, with the digest of the truncated bytes
        lambda: delta(SECOND, 2, b'\x07' + DELTA_BYTES[1:]),
        lambda: delta(SECOND, 2, base=7),  # a base that the client does not have
        lambda: delta(make_state(4, size_bytes=64), 2),  # a delta of other tensors
        lambda: delta(SECOND, 2, DELTA_BYTES + bytes(len(SECOND.data))),  # larger than the state
        lambda: [*delta(SECOND, 2)[:3], delta(SECOND, 2)[-1]],  # committed too early
    ],
)
async def test_delta_that_cannot_be_applied_leads_to_a_whole_transfer(broken_delta: Callable[[], list[Any]]) -> None:
    """If a delta cannot be applied, the follower requests and receives the complete version."""
    fake = FakeStreams(
        [
            lambda request: [*whole(FIRST, 1), *broken_delta()],
            lambda request: whole(SECOND, 2),
            lambda request: [],
        ]
    )
    async with client_of(fake) as client:
        assert (await follow_states(client, 2))[1].state == SECOND
    assert list(fake.requests[1].accepted_encodings) == []
    assert (fake.requests[1].held_version, fake.requests[1].resume_offset) == (1, 0)


async def test_damaged_chunk_of_a_delta_is_requested_again() -> None:
    """A delta resumes at the offset where a damaged, repeated or misplaced chunk arrived."""
    good = delta(SECOND, 2)
    damaged = weights_pb2.WeightFrame()
    damaged.CopyFrom(good[2])
    damaged.chunk.data = bytes(len(damaged.chunk.data))
    fake = FakeStreams(
        [
            lambda request: [*whole(FIRST, 1), good[0], good[1], damaged],
            lambda request: [*delta(SECOND, 2, offset=request.resume_offset)[:2], good[1]],
            lambda request: [delta(SECOND, 2, offset=request.resume_offset)[0], good[-2]],
            lambda request: delta(SECOND, 2, offset=request.resume_offset),
        ]
    )
    async with client_of(fake) as client:
        assert (await follow_states(client, 2))[1].state == SECOND
    assert [request.resume_offset for request in fake.requests] == [0, CHUNK, 2 * CHUNK, 2 * CHUNK]


async def test_shared_state_is_mapped_and_its_file_can_be_opened(tmp_path: Path) -> None:
    """The file of a shared state can be opened while the state is in use."""
    sender, segments = Segments(tmp_path / 'shm'), Segments(tmp_path / 'shm')
    created = sender.create(len(FIRST.data))
    created.data[:] = FIRST.data
    message = weights_pb2.SharedSegment(
        host_id=sender.host_id, name=created.ref.name, size_bytes=created.ref.size_bytes
    )
    fake = FakeStreams([lambda request: shared(FIRST, 1, message)])
    async with client_of(fake, segments) as client:
        state = await client.fetch_version('ad-1')
    created.remove()
    assert fake.requests[0].host_id == sender.host_id
    assert (state.state, state.encoding, state.wire_size_bytes) == (FIRST, Encoding.SHARED_MEMORY, 0)
    path = Path(state.segment_path)
    assert path.read_bytes() == bytes(FIRST.data)  # noqa: ASYNC240 (a few bytes in memory)
    del state
    gc.collect()
    assert not path.exists()  # noqa: ASYNC240 (in memory)


@pytest.mark.parametrize('name', ['../secret', '/etc/passwd', 'link', 'missing', 'wrong', 'short'])
async def test_segment_that_cannot_be_used_is_replaced_by_bytes(tmp_path: Path, name: str) -> None:
    """An unusable segment is replaced by plain bytes; after two such segments, the client requests no segments."""
    folder = tmp_path / 'shm'
    segments = Segments(folder)
    (tmp_path / 'secret').write_bytes(FIRST.data)
    (folder / 'link').symlink_to(tmp_path / 'secret')
    (folder / 'wrong').write_bytes(SECOND.data)
    (folder / 'short').write_bytes(FIRST.data[:-1])
    message = weights_pb2.SharedSegment(host_id=segments.host_id, name=name, size_bytes=len(FIRST.data))
    fake = FakeStreams([lambda request: shared(FIRST, 1, message) if request.host_id else whole(FIRST, 1)] * 5)
    async with client_of(fake, segments) as client:
        for _ in range(3):
            state = await client.fetch_version('ad-1')
            assert (state.state, state.encoding) == (FIRST, Encoding.WHOLE)
    assert [bool(request.host_id) for request in fake.requests] == [True, False, True, False, False]
    assert sorted(path.name for path in folder.iterdir() if '.' in path.name) == []


async def test_published_segment_is_removed_after_the_publish(tmp_path: Path) -> None:
    """A publish in shared memory sends only header and commit, and its segment exists until the service responds."""
    segments = Segments(tmp_path / 'shm')
    seen: list[bytes] = []

    def read_segment(header: Any) -> list[Any]:
        seen.append((segments.folder / header.segment.name).read_bytes())
        return []

    fake = FakeStreams([read_segment])
    async with client_of(fake, segments) as client:
        await client.publish_version('ad-1', FIRST, version=1)
    assert [frame.WhichOneof('frame') for frame in fake.published[0]] == ['header', 'commit']
    assert fake.published[0][0].header.encoding == SHARED
    assert seen == [bytes(FIRST.data)]
    assert segment_names(segments) == []


async def test_service_on_another_host_receives_bytes(tmp_path: Path) -> None:
    """A service that has refused a segment receives plain bytes, and no files remain in the folder."""
    segments = Segments(tmp_path / 'shm')
    fake = FakeStreams([lambda header: [MemoryNotShared()], lambda header: [], lambda header: []])
    async with client_of(fake, segments) as client:
        for version in (1, 2):
            await client.publish_version('ad-1', FIRST, version=version)
    assert [call[0].header.encoding for call in fake.published] == [SHARED, 1, 1]
    assert b''.join(frame.chunk.data for frame in fake.published[1]) == bytes(FIRST.data)
    assert segment_names(segments) == []


async def test_refused_or_cancelled_publish_leaves_no_segment(tmp_path: Path) -> None:
    """A refused or cancelled publish leaves no segment."""
    segments = Segments(tmp_path / 'shm')
    fake = FakeStreams([lambda header: [InvalidField('x', 'y')]])
    async with client_of(fake, segments) as client:
        with pytest.raises(DomainError):
            await client.publish_version('ad-1', FIRST, version=1)
        assert segment_names(segments) == []
        fake.started.clear()
        publish_task = asyncio.ensure_future(client.publish_version('ad-1', FIRST, version=2))
        fake.script.append(lambda header: [Draining()])
        await fake.started.wait()
        publish_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publish_task
    assert segment_names(segments) == []


async def test_segments_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """A new `Segments` removes segments of processes that no longer run, and keeps segments of running processes."""
    folder = tmp_path / 'shm'
    live = Segments(folder)
    live_segment = live.create(8)
    program = (
        'import sys\nfrom pathlib import Path\nfrom twinkle_services.kit.weights import Segments\n'
        'segment = Segments(Path(sys.argv[1])).create(1000)\nprint(segment.ref.name, flush=True)\nsys.stdin.read()\n'
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, '-c', program, str(folder), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    name = (await process.stdout.readline()).decode().strip()
    live.sweep()
    assert segment_names(live) == sorted([name, live_segment.ref.name])
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    Segments(folder)
    assert segment_names(live) == [live_segment.ref.name]


def segment_names(segments: Segments) -> list[str]:
    gc.collect()
    return sorted(path.name for path in segments.folder.iterdir() if '.' in path.name)


def test_delta_of_these_tests_has_several_chunks_and_is_smaller() -> None:
    """The delta of these tests has several chunks and is smaller than the state."""
    assert 3 * CHUNK < len(DELTA_BYTES) < len(SECOND.data)
