"""Publish, Subscribe and Fetch over loopback: complete states, interrupted streams, and isolation of tenants."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.checkpoint_service import (
    ALICE,
    BOB,
    Running,
    as_tenant,
    chunk_request,
    failure_of,
    make_state,
    publish_frames,
    serving,
    stream_of,
    until,
)
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import StateChunk, StateSection, chunk_checksum, unpack_state
from twinkle_services.checkpoint.application.versions import Versions
from twinkle_services.kit.paging import Page
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights.wire import ReceivedState, Synced

MIB = 1 << 20


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    """A service with an empty store; calls are made for Alice by default."""
    async with serving(tmp_path) as running:
        with acting_for(ALICE):
            yield running


async def test_published_state_is_fetched_and_followed_bitwise(service: Running) -> None:
    """Fetch and Subscribe send a published state bitwise unchanged; Subscribe then sends the synced marker."""
    state = make_state(1, size_bytes=5 * MIB + 8 * 32)
    version = await service.weights.publish_version('ad-1', state, version=3)
    assert (version.version, version.digest, version.size_bytes) == (
        3,
        state.manifest.digest,
        state.manifest.size_bytes,
    )
    assert (await service.weights.fetch_version('ad-1')).state == state
    assert (await service.weights.fetch_version('ad-1', 3)).state == state
    async with aclosing(service.weights.follow('ad-1')) as events:
        first = await anext(events)
        assert isinstance(first, ReceivedState)
        assert (first.header.version.version, first.state) == (3, state)
        assert await anext(events) == Synced()
        newer = make_state(2)
        await service.weights.publish_version('ad-1', newer, version=4)
        following = await anext(events)
        assert isinstance(following, ReceivedState)
        assert following.state == newer


async def test_checkpoint_is_fetched_with_or_without_the_trainer_section(service: Running) -> None:
    """A checkpoint can be fetched completely or without its trainer section."""
    state = make_state(1, size_bytes=3 * MIB, is_trainer_included=True)
    target = weights_pb2.CheckpointTarget(name='final', step_count=30)
    saved = (await service.weights.save_checkpoint('ad-1', state, target)).checkpoint
    assert (saved.path, saved.is_optimizer_included, saved.step_count) == ('twinkle://ad-1/weights/final', True, 30)
    whole = await service.weights.fetch_checkpoint(saved.path)
    assert (whole.state, whole.header.checkpoint.step_count) == (state, 30)
    part = await service.weights.fetch_checkpoint(saved.checkpoint_id, is_adapter_only=True)
    assert unpack_state(part.state.manifest, part.state.data) == unpack_state(state.manifest, state.data)
    assert not part.state.manifest.entries_of(StateSection.TRAINER)


@pytest.mark.parametrize('seed', range(20))
async def test_interrupted_publish_leaves_the_old_version(service: Running, seed: int) -> None:
    """An interrupted or damaged publish leaves the old version, and no other files."""
    rng = random.Random(seed)
    old, new = make_state(1), make_state(2, size_bytes=rng.randrange(32, 300_000, 32))
    await service.weights.publish_version('ad-1', old, version=1)
    frames = publish_frames(new, version=2, chunk_bytes=rng.randrange(1, 40_000))
    prefix = frames[: rng.randrange(1, len(frames))]
    await rng.choice([_end_early, _cancel, _damage])(service, prefix, rng)
    assert (await service.weights.fetch_version('ad-1')).state == old
    await until(lambda: len(service.stored_folders()) == 1)
    await service.weights.publish_version('ad-1', new, version=2)
    assert (await service.weights.fetch_version('ad-1')).state == new


async def _end_early(service: Running, frames: list[Any], rng: random.Random) -> None:
    del rng
    failure = await failure_of(service.streams.Publish(stream_of(*frames)))
    assert (failure.code, failure.reason) == ('ABORTED', 'STREAM_OUT_OF_ORDER')


async def _cancel(service: Running, frames: list[Any], rng: random.Random) -> None:
    del rng
    sent = asyncio.Event()

    async def hang() -> AsyncIterator[Any]:
        for frame in frames:
            yield frame
        sent.set()
        await asyncio.Event().wait()

    call = service.streams.Publish(hang())
    await sent.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def _damage(service: Running, frames: list[Any], rng: random.Random) -> None:
    data = rng.randbytes(100)
    bad = chunk_request(StateChunk(0, data, chunk_checksum(data) ^ 1 << rng.randrange(63)))
    failure = await failure_of(service.streams.Publish(stream_of(frames[0], bad)))
    assert failure.reason in {'CHUNK_CORRUPT', 'INVALID_FIELD'}  # the chunk may extend beyond a small state


@pytest.mark.parametrize('seed', range(20))
async def test_subscribe_resumes_at_any_byte(service: Running, seed: int) -> None:
    """A subscription that resumes at any byte sends exactly the remaining bytes."""
    rng = random.Random(seed)
    state = make_state(seed, size_bytes=rng.randrange(32, 3 * MIB, 32))
    await service.weights.publish_version('ad-1', state, version=1)
    cut = rng.randrange(state.manifest.size_bytes + 1)
    request = wire.SubscribeRequest(adapter_id='ad-1', resume_version=1, resume_offset=cut, is_single=True)
    responses = [response async for response in service.streams.Subscribe(request)]
    assert responses[0].frame.header.resume_offset == cut
    assert responses[-1].is_synced
    tail = b''.join(response.frame.chunk.data for response in responses[1:-2])
    assert tail == state.data[cut:]
    assert responses[-2].frame.commit.digest == state.manifest.digest


async def test_resume_of_an_evicted_version_sends_the_newest(service: Running) -> None:
    """If the version to resume was evicted, the newest version is sent from its first byte."""
    for version in range(1, 7):
        await service.weights.publish_version('ad-1', make_state(version), version=version)
    request = wire.SubscribeRequest(adapter_id='ad-1', resume_version=1, resume_offset=100, is_single=True)
    responses = [response async for response in service.streams.Subscribe(request)]
    header = responses[0].frame.header
    assert (header.version.version, header.resume_offset) == (6, 0)


async def test_subscriber_with_the_newest_version_is_synced_immediately(service: Running) -> None:
    """A subscriber that has the newest version receives only the synced marker."""
    await service.weights.publish_version('ad-1', make_state(1), version=1)
    request = wire.SubscribeRequest(adapter_id='ad-1', held_version=1, is_single=True)
    assert [response.is_synced async for response in service.streams.Subscribe(request)] == [True]


async def test_slow_subscriber_delays_no_other_subscriber(service: Running) -> None:
    """A slow subscriber delays no publish or fetch; it receives its first version completely, and then the newest."""
    big = make_state(1, size_bytes=24 * MIB)
    await service.weights.publish_version('ad-1', big, version=1)
    slow = service.streams.Subscribe(wire.SubscribeRequest(adapter_id='ad-1'))
    assert (await slow.read()).frame.HasField('header')
    for version in range(2, 9):
        await service.weights.publish_version('ad-1', make_state(version), version=version)
        assert (await service.weights.fetch_version('ad-1')).header.version.version == version
    await until(lambda: len(service.stored_folders()) == 4)
    data = bytearray()
    while (response := await slow.read()).frame.HasField('chunk'):
        data += response.frame.chunk.data
    assert response.frame.commit.digest == big.manifest.digest
    assert data == big.data
    assert (await slow.read()).frame.header.version.version == 8
    slow.cancel()


async def test_repeated_publish_returns_the_recorded_version(service: Running) -> None:
    """If a publish is repeated, its header alone is enough to return the recorded version."""
    state = make_state(1, size_bytes=8 * MIB)
    first = await service.weights.publish_version('ad-1', state, version=1)
    assert await service.weights.publish_version('ad-1', state, version=1) == first
    assert (await service.streams.Publish(stream_of(publish_frames(state)[0]))).version == first


async def test_concurrent_publishes_of_a_state_create_one_version(service: Running) -> None:
    """Concurrent publishes of the same state all return the same version."""
    state = make_state(1, size_bytes=2 * MIB)
    versions = await asyncio.gather(*(service.weights.publish_version('ad-1', state, version=1) for _ in range(5)))
    assert all(version == versions[0] for version in versions)
    await until(lambda: len(service.stored_folders()) == 1)


async def test_one_of_two_conflicting_publishes_is_refused(service: Running) -> None:
    """One of two concurrent publishes is refused if they have different states and the same number."""
    frames = [publish_frames(make_state(seed, size_bytes=MIB)) for seed in (1, 2)]
    calls = [service.streams.Publish(stream_of(*each)) for each in frames]
    results = await asyncio.gather(*calls, return_exceptions=True)
    failures = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert [failure.code() for failure in failures] == [grpc.StatusCode.ABORTED]


@pytest.mark.parametrize('version', [1, 2])
async def test_older_or_other_version_is_a_conflict(service: Running, version: int) -> None:
    """A publish is refused if its number is below the newest number, or belongs to a different state."""
    await service.weights.publish_version('ad-1', make_state(1), version=2)
    failure = await failure_of(service.streams.Publish(stream_of(*publish_frames(make_state(9), version=version))))
    assert (failure.code, failure.reason) == ('ABORTED', 'VERSION_CONFLICT')
    assert failure.metadata == {'adapterId': 'ad-1', 'version': str(version)}


async def test_existing_checkpoint_is_replaced_only_if_allowed(service: Running) -> None:
    """A checkpoint is replaced only if overwriting is allowed; then the old state is deleted."""
    old, new = make_state(1), make_state(2)
    target = weights_pb2.CheckpointTarget(name='best')
    await service.weights.save_checkpoint('ad-1', old, target)
    failure = await failure_of(service.streams.Publish(stream_of(*publish_frames(new, checkpoint=target))))
    assert (failure.code, failure.reason) == ('ALREADY_EXISTS', 'CHECKPOINT_EXISTS')
    target.is_overwrite_allowed = True
    await service.weights.save_checkpoint('ad-1', new, target)
    assert (await service.weights.fetch_checkpoint('ad-1/weights/best')).state == new
    assert len(service.stored_folders()) == 1


async def test_state_of_another_tenant_is_not_found(service: Running) -> None:
    """The error for another tenant's version or checkpoint equals the error for a missing version or checkpoint."""
    target = weights_pb2.CheckpointTarget(name='final')
    await service.weights.publish_version('ad-1', make_state(1), version=1)
    await service.weights.save_checkpoint('ad-1', make_state(1), target)
    with acting_for(BOB):
        requests = [_newest('ad-1'), wire.FetchRequest(checkpoint_path='twinkle://ad-1/weights/final')]
        foreign = [await failure_of(service.streams.Fetch(request)) for request in requests]
        foreign.append(await failure_of(service.streams.Subscribe(wire.SubscribeRequest(adapter_id='ad-1'))))
        await service.weights.publish_version('ad-1', make_state(5), version=7)
        assert (await service.weights.fetch_version('ad-1')).header.version.version == 7
    missing = [
        await failure_of(service.streams.Fetch(_newest('ad-9'))),
        await failure_of(service.streams.Fetch(wire.FetchRequest(checkpoint_path='twinkle://ad-9/weights/final'))),
        await failure_of(service.streams.Subscribe(wire.SubscribeRequest(adapter_id='ad-9'))),
    ]
    assert [failure.message.replace('ad-9', 'ad-1') for failure in missing] == [each.message for each in foreign]
    assert {failure.code for failure in [*missing, *foreign]} == {'NOT_FOUND'}
    assert (await service.weights.fetch_version('ad-1')).state == make_state(1)


async def test_clients_may_not_publish_or_fetch_weights(service: Running) -> None:
    """A client may not publish, subscribe or fetch, even with the scopes `train`, `sample` and `data`."""
    stub = type(service.streams)(service.client_channel)
    metadata = as_tenant('alice')
    calls = [
        stub.Publish(stream_of(*publish_frames(make_state(1))), metadata=metadata),
        stub.Subscribe(wire.SubscribeRequest(adapter_id='ad-1'), metadata=metadata),
        stub.Fetch(_newest(), metadata=metadata),
    ]
    failures = [await failure_of(call) for call in calls]
    assert {(failure.code, failure.reason) for failure in failures} == {('PERMISSION_DENIED', 'SCOPE_MISSING')}


@pytest.mark.slow
async def test_a_thousand_versions_keep_disk_and_catalogue_bounded(service: Running) -> None:
    """Only the newest four versions, the capacity of the ring, remain after a thousand publishes."""
    for version in range(1, 1001):
        await service.weights.publish_version('ad-1', make_state(version, size_bytes=64), version=version)
    await until(lambda: [each.split('/')[3] for each in service.stored_folders()] == ['1000', '997', '998', '999'])
    listed, _ = await Versions(service.registry).list_page(ALICE, 'ad-1', Page(size=1000))
    assert [version.version for version in listed] == [1000, 999, 998, 997]
    assert (await service.weights.fetch_version('ad-1')).state == make_state(1000, size_bytes=64)


async def test_versions_survive_a_restart(tmp_path: Path) -> None:
    """Pinned versions, the newest versions and checkpoints survive a restart; old version numbers are still refused."""
    async with serving(tmp_path) as service:
        with acting_for(ALICE):
            await service.weights.publish_version('ad-1', make_state(1), version=1, is_pinned=True)
            for version in range(2, 9):
                await service.weights.publish_version('ad-1', make_state(version), version=version)
            await service.weights.save_checkpoint('ad-1', make_state(5), weights_pb2.CheckpointTarget(name='kept'))
    async with serving(tmp_path, ring_capacity=2) as service:
        with acting_for(ALICE):
            listed, _ = await Versions(service.registry).list_page(ALICE, 'ad-1', Page(size=1000))
            assert [version.version for version in listed] == [8, 7, 1]
            assert (await service.weights.fetch_version('ad-1', 1)).state == make_state(1)
            assert (await service.weights.fetch_version('ad-1')).state == make_state(8)
            assert (await service.weights.fetch_checkpoint('ad-1/weights/kept')).state == make_state(5)
            await until(lambda: len(service.stored_folders()) == 4)
            failure = await failure_of(service.streams.Publish(stream_of(*publish_frames(make_state(9), version=6))))
            assert failure.reason == 'VERSION_CONFLICT'


def _newest(adapter_id: str = 'ad-1') -> wire.FetchRequest:
    return wire.FetchRequest(version=wire.VersionRef(adapter_id=adapter_id))
