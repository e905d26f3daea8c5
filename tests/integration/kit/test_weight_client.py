"""Tests of the checkpoint service's client with a service that fails, or sends damaged data or wrong digests."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from typing import Any

import grpc
import pytest

from fixtures.checkpoint_service import make_state
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2_grpc, weights_pb2
from twinkle.checkpoint_engine import CHUNK_BYTES, PackedState, StateChunk, iter_chunks
from twinkle_services.kit.config import ServiceConfig
from twinkle_services.kit.errors import DomainError, Draining, StreamOutOfOrder, VersionNotFound
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.server import Endpoint, RpcServer
from twinkle_services.kit.weights.wire import ReceivedState, Synced, WeightClient, chunk_to_proto, manifest_to_proto

STATE = make_state(1, size_bytes=4 * CHUNK_BYTES)
OTHER = make_state(2, size_bytes=3 * CHUNK_BYTES)


class FakeConfig(ServiceConfig):
    """Configuration of the fake checkpoint service."""

    service = 'checkpoint'


class FakeStreams(weight_stream_service_pb2_grpc.WeightStreamServiceServicer):
    """A servicer that sends scripted frames, and records the requests."""

    def __init__(self, *script: Callable[[Any], list[Any]]) -> None:
        self._script = list(script)
        self.requests: list[Any] = []

    async def Subscribe(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Send the next part of the script."""
        for item in self._next(request):
            synced = isinstance(item, Synced)
            yield wire.SubscribeResponse(is_synced=True) if synced else wire.SubscribeResponse(frame=item)

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Send the next part of the script."""
        for item in self._next(request):
            yield wire.FetchResponse(frame=item)

    async def Publish(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        """Read the first message; the next part of the script may refuse it."""
        list(self._next(await anext(request_iterator)))
        return wire.PublishResponse(version=weights_pb2.AdapterVersion(version=1))

    def _next(self, request: Any) -> Any:
        self.requests.append(request)
        for item in self._script.pop(0)(request):
            if isinstance(item, DomainError):
                raise item
            yield item


def frames(state: PackedState, *, version: int = 1, offset: int = 0) -> list[weights_pb2.WeightFrame]:
    """Return the frames of a state, starting at byte `offset`."""
    header = weights_pb2.FrameHeader(
        manifest=manifest_to_proto(state.manifest),
        encoding=weights_pb2.FRAME_ENCODING_WHOLE,
        version=weights_pb2.VersionTarget(version=version),
        resume_offset=offset,
    )
    return [
        weights_pb2.WeightFrame(header=header),
        *(weights_pb2.WeightFrame(chunk=chunk_to_proto(chunk)) for chunk in iter_chunks(state.data, offset=offset)),
        weights_pb2.WeightFrame(commit=weights_pb2.FrameCommit(digest=state.manifest.digest)),
    ]


def damaged_chunk(offset: int) -> weights_pb2.WeightFrame:
    """Return a chunk with a wrong checksum."""
    return weights_pb2.WeightFrame(chunk=chunk_to_proto(StateChunk(offset, bytes(CHUNK_BYTES), 0)))


@asynccontextmanager
async def client_of(servicer: FakeStreams, *, attempts: int = 3) -> AsyncIterator[WeightClient]:
    """Serve the fake, and yield a client that is connected to it."""
    endpoint = Endpoint(
        wire.DESCRIPTOR.services_by_name['WeightStreamService'],
        servicer,
        weight_stream_service_pb2_grpc.add_WeightStreamServiceServicer_to_server,
    )
    server = RpcServer(FakeConfig(), authenticator=InternalAuthenticator(''), endpoints=[endpoint])
    await server.start()
    channel: grpc.aio.Channel = open_channel(server.address)
    try:
        yield WeightClient(channel, attempts=attempts)
    finally:
        await channel.close()
        await server.stop(timedelta())


@pytest.mark.parametrize('attempts', [1, 3])
async def test_fetch_resumes_at_the_first_missing_byte(attempts: int) -> None:
    """Received bytes are not requested again after a broken stream or a damaged chunk, even with `attempts=1`."""
    fake = FakeStreams(
        lambda request: [*frames(STATE)[:3], Draining()],
        lambda request: [*frames(STATE, offset=request.offset)[:2], damaged_chunk(request.offset + CHUNK_BYTES)],
        lambda request: frames(STATE, offset=request.offset),
    )
    async with client_of(fake, attempts=attempts) as client:
        assert (await client.fetch_version('ad-1')).state == STATE
    assert [request.offset for request in fake.requests] == [0, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES]


async def test_fetch_never_mixes_two_states() -> None:
    """If another state is sent after a broken stream, it is received from its first byte."""
    fake = FakeStreams(
        lambda request: [*frames(STATE)[:3], Draining()],
        lambda request: frames(OTHER, offset=request.offset),
        lambda request: frames(OTHER, offset=request.offset),
    )
    async with client_of(fake) as client:
        assert (await client.fetch_version('ad-1')).state == OTHER


async def test_fetch_fails_without_progress_and_after_refusals() -> None:
    """A fetch fails if none of its attempts makes progress, and immediately after a refusal."""
    async with client_of(FakeStreams(*[lambda request: [Draining()]] * 9), attempts=1) as client:
        with pytest.raises(DomainError) as caught:
            await client.fetch_version('ad-1')
    assert caught.value.reason == 'DRAINING'
    async with client_of(FakeStreams(lambda request: [VersionNotFound('ad-1', 9)])) as client:
        with pytest.raises(DomainError) as caught:
            await client.fetch_version('ad-1', 9)
    assert caught.value.reason == 'VERSION_NOT_FOUND'


async def test_follow_resumes_a_partial_version() -> None:
    """A partial version is resumed; the next stream starts after the received version and accepts deltas."""
    fake = FakeStreams(
        lambda request: frames(STATE, version=4)[:3],
        lambda request: [*frames(STATE, version=4, offset=request.resume_offset), Draining()],
        lambda request: [Synced(), *frames(OTHER, version=5), Synced()],
    )
    async with client_of(fake) as client, aclosing(client.follow('ad-1', held_version=3)) as events:
        received = [await anext(events) for _ in range(4)]
    assert [item.state for item in received if isinstance(item, ReceivedState)] == [STATE, OTHER]
    resumed = [(r.held_version, r.resume_version, r.resume_offset) for r in fake.requests]
    assert resumed[:3] == [(3, 0, 0), (3, 4, 2 * CHUNK_BYTES), (4, 0, 0)]
    assert [bool(r.accepted_encodings) for r in fake.requests[:3]] == [False, False, True]


async def test_state_with_a_wrong_digest_is_not_returned() -> None:
    """A state with valid checksums and a wrong digest is requested again from the start."""
    mismatched = [frames(STATE)[0], *frames(make_state(9, size_bytes=4 * CHUNK_BYTES))[1:]]
    fake = FakeStreams(lambda request: mismatched, lambda request: frames(STATE, offset=request.offset))
    async with client_of(fake) as client:
        assert (await client.fetch_version('ad-1')).state == STATE
    assert [request.offset for request in fake.requests] == [0, 0]


async def test_publish_is_repeated_after_transient_errors() -> None:
    """A publish is repeated after transient errors, and not after other errors."""
    fake = FakeStreams(lambda request: [Draining()], lambda request: [])
    async with client_of(fake) as client:
        assert (await client.publish_version('ad-1', STATE, version=1)).version == 1
    async with client_of(FakeStreams(lambda request: [StreamOutOfOrder('x')])) as client:
        with pytest.raises(DomainError) as caught:
            await client.publish_version('ad-1', STATE, version=1)
    assert caught.value.reason == 'STREAM_OUT_OF_ORDER'
