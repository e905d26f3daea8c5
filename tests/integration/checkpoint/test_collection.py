"""Tests of the deletion of unused versions, and of deletions during a fetch, a pin or disk errors."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2

from fixtures.checkpoint_service import ALICE, Running, failure_of, make_state, publish_frames, serving, stream_of
from fixtures.disk_faults import refusing
from twinkle.api.checkpoint.v1 import version_service_pb2, weight_stream_service_pb2, weights_pb2
from twinkle_services.checkpoint.application.checkpoints import Checkpoints
from twinkle_services.checkpoint.application.versions import Versions
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.paging import Page
from twinkle_services.kit.rpc.context import acting_for

IDLE = timedelta(days=10)


@asynccontextmanager
async def serving_alice(folder: Path, clock: FakeClock) -> AsyncIterator[Running]:
    """Run a service; calls are made for Alice."""
    async with serving(folder, clock=clock) as service:
        with acting_for(ALICE):
            yield service


async def test_unused_versions_are_deleted_including_the_newest(tmp_path: Path) -> None:
    """All unused versions are deleted, even the newest, and the newest version's number is not used again."""
    clock = FakeClock()
    async with serving_alice(tmp_path, clock) as service:
        for version in (1, 2, 3):
            await service.weights.publish_version('ad-1', make_state(version), version=version)
        clock.advance(IDLE)
        assert await Versions(service.registry).collect(IDLE) == 0
        clock.advance(timedelta(seconds=1))
        assert await Versions(service.registry).collect(IDLE) == 3
        assert service.stored_folders() == []
        await _assert_collected(service)


async def test_version_numbers_continue_after_a_restart(tmp_path: Path) -> None:
    """Version numbers continue after a restart even if all versions were deleted as unused."""
    clock = FakeClock()
    async with serving_alice(tmp_path, clock) as service:
        await service.weights.publish_version('ad-1', make_state(3), version=3)
        clock.advance(2 * IDLE)
        assert await Versions(service.registry).collect(IDLE) == 1
    async with serving_alice(tmp_path, clock) as service:
        await _assert_collected(service)
        await service.weights.publish_version('ad-1', make_state(4), version=4)
        assert (await service.weights.fetch_version('ad-1')).state == make_state(4)
    async with serving_alice(tmp_path, clock) as service:
        await _assert_conflict(service)


async def test_used_versions_are_not_collected(tmp_path: Path) -> None:
    """Versions that are pinned, were read recently, or have an adapter with followers are not deleted as unused."""
    clock = FakeClock()
    async with serving_alice(tmp_path, clock) as service:
        await service.weights.publish_version('ad-1', make_state(1), version=1, is_pinned=True)
        for version in (2, 3, 4):
            await service.weights.publish_version('ad-1', make_state(version), version=version)
        await service.weights.publish_version('ad-2', make_state(9), version=1)
        call = service.streams.Subscribe(weight_stream_service_pb2.SubscribeRequest(adapter_id='ad-2', held_version=1))
        assert (await call.read()).is_synced
        clock.advance(2 * IDLE)
        await service.weights.fetch_version('ad-1', 3)
        assert await Versions(service.registry).collect(IDLE) == 2
        assert await _stored_versions(service) == [3, 1]
        assert (await service.weights.fetch_version('ad-1')).header.version.version == 3
        assert (await service.weights.fetch_version('ad-2')).state == make_state(9)
        call.cancel()


async def test_a_start_counts_as_use(tmp_path: Path) -> None:
    """The start of the service counts as a use of all versions."""
    clock = FakeClock()
    async with serving_alice(tmp_path, clock) as service:
        await service.weights.publish_version('ad-1', make_state(1), version=1)
    clock.advance(2 * IDLE)
    async with serving_alice(tmp_path, clock) as service:
        assert await Versions(service.registry).collect(IDLE) == 0


@pytest.mark.parametrize('number', [errno.EROFS, errno.ENOSPC, errno.EIO, errno.EMFILE])
async def test_disk_errors_do_not_end_the_cleanup(tmp_path: Path, number: int) -> None:
    """If one disk call fails, a cleanup deletes at least one of two states, and a second cleanup deletes the rest."""
    clock = FakeClock()
    for calls in range(12):
        # The disk call after the first `calls` ones fails. Without shared memory, each deletion uses the disk.
        async with serving(tmp_path / str(calls), clock=clock, memory_bytes=0) as service:
            with acting_for(ALICE):
                for adapter_id in ('ad-1', 'ad-2'):
                    await service.weights.publish_version(adapter_id, make_state(1), version=1)
                    target = weights_pb2.CheckpointTarget(name='short', ttl=duration_pb2.Duration(seconds=60))
                    await service.weights.save_checkpoint(adapter_id, make_state(1), target)
            clock.advance(2 * IDLE)
            cleanups = Checkpoints(service.registry).delete_expired, partial(Versions(service.registry).collect, IDLE)
            for clean_up in cleanups:
                with refusing(service.state_dir, number=number, after=calls):
                    count = await clean_up()
                assert count >= 1
                assert count + await clean_up() == 2


async def test_running_fetch_of_a_deleted_version_completes(tmp_path: Path) -> None:
    """A running fetch returns all bytes of a version that is deleted; a later fetch does not find the version."""
    state = make_state(1, size_bytes=24 << 20)
    async with serving(tmp_path) as service:
        with acting_for(ALICE):
            await service.weights.publish_version('ad-1', state, version=1)
            await service.weights.publish_version('ad-1', make_state(2), version=2)
            reference = weight_stream_service_pb2.VersionRef(adapter_id='ad-1', version=1)
            request = weight_stream_service_pb2.FetchRequest(version=reference)
            call = service.streams.Fetch(request)
            frames = [(await call.read()).frame]
            await service.versions.DeleteVersion(
                version_service_pb2.DeleteVersionRequest(adapter_id='ad-1', version=1),
                metadata=(('x-twinkle-tenant', 'alice'), ('x-twinkle-scopes', 'train')),
            )
            frames += [response.frame async for response in call]
            assert b''.join(frame.chunk.data for frame in frames) == state.data
            assert (await failure_of(service.streams.Fetch(request))).reason == 'VERSION_NOT_FOUND'


@pytest.mark.parametrize('order', ['pin first', 'publish first'])
async def test_concurrent_pin_and_eviction_are_consistent(tmp_path: Path, order: str) -> None:
    """A pin that is sent together with an evicting publish either keeps the version or fails as not found."""
    async with serving(tmp_path, ring_capacity=1) as service:
        with acting_for(ALICE):
            await service.weights.publish_version('ad-1', make_state(1), version=1)
            for version in range(2, 30):
                publish = service.streams.Publish(stream_of(*publish_frames(make_state(version), version=version)))
                pin = service.versions.PinVersion(
                    version_service_pb2.PinVersionRequest(adapter_id='ad-1', version=version - 1),
                    metadata=(('x-twinkle-tenant', 'alice'), ('x-twinkle-scopes', 'train')),
                )
                first, second = (pin, publish) if order == 'pin first' else (publish, pin)
                # The pin may already have failed.
                with suppress(grpc.aio.AioRpcError):
                    await first.wait_for_connection()
                codes = {await second.code(), await first.code()}
                assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND}
                is_pinned = await pin.code() is grpc.StatusCode.OK
                assert (version - 1 in await _stored_versions(service)) == is_pinned
                if is_pinned:
                    assert (await service.weights.fetch_version('ad-1', version - 1)).state == make_state(version - 1)


async def _assert_collected(service: Running) -> None:
    failure = await failure_of(
        service.streams.Fetch(
            weight_stream_service_pb2.FetchRequest(version=weight_stream_service_pb2.VersionRef(adapter_id='ad-1'))
        )
    )
    assert failure.reason == 'ADAPTER_NOT_FOUND'
    await _assert_conflict(service)


async def _assert_conflict(service: Running) -> None:
    failure = await failure_of(service.streams.Publish(stream_of(*publish_frames(make_state(3), version=3))))
    assert failure.reason == 'VERSION_CONFLICT'


async def _stored_versions(service: Running) -> list[int]:
    """Return the versions of ad-1, newest first."""
    listed, _ = await Versions(service.registry).list_page(ALICE, 'ad-1', Page(size=100))
    return [version.version for version in listed]
