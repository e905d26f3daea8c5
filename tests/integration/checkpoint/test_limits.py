"""Tests of the checkpoint service without free descriptors or disk space, and of deleting an adapter's versions."""

import errno
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fixtures.checkpoint_service import (
    ALICE,
    ServiceProcess,
    as_tenant,
    failure_of,
    make_state,
    publish_frames,
    serving,
    stream_of,
)
from twinkle.api.checkpoint.v1 import (
    version_service_pb2,
    version_service_pb2_grpc,
    weight_stream_service_pb2_grpc,
    weights_pb2,
)
from twinkle_services.kit.errors import StoreUnavailable
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.store_threads import StoreThreads

ADAPTERS = 60


async def test_published_versions_keep_no_descriptors(tmp_path: Path) -> None:
    """The number of open descriptors does not grow with the number of adapters that have published versions."""
    async with serving(tmp_path) as service:
        with acting_for(ALICE):
            await service.weights.publish_version('ad-0', make_state(0), version=1)
            before = len(_descriptors('self'))
            for number in range(1, ADAPTERS):
                await service.weights.publish_version(f'ad-{number}', make_state(number), version=1)
            assert len(_descriptors('self')) < before + ADAPTERS // 2
            assert (await service.weights.fetch_version('ad-1')).state == make_state(1)


async def test_versions_of_a_deleted_adapter_are_deleted(tmp_path: Path) -> None:
    """DeleteVersions deletes an adapter's unpinned versions from memory and disk, and numbers are not reused."""
    async with serving(tmp_path) as service:
        with acting_for(ALICE):
            await service.weights.publish_version('ad-1', make_state(1), version=1)
            await service.weights.publish_version('ad-1', make_state(2), version=2)
            await service.weights.publish_version('ad-2', make_state(3), version=1, is_pinned=True)
            internal = version_service_pb2_grpc.VersionServiceStub(service.channel)
            for adapter_id in ('ad-1', 'ad-2', 'ad-3'):
                await internal.DeleteVersions(version_service_pb2.DeleteVersionsRequest(adapter_id=adapter_id))
            assert _memory_segments(tmp_path) == 1
            assert [folder.split('/')[1] for folder in service.stored_folders()] == ['ad-2']
            get = version_service_pb2.GetVersionRequest(adapter_id='ad-1')
            assert (await failure_of(internal.GetVersion(get))).reason == 'ADAPTER_NOT_FOUND'
            publish = service.streams.Publish(stream_of(*publish_frames(make_state(4), version=2)))
            assert (await failure_of(publish)).reason == 'VERSION_CONFLICT'


async def test_clients_cannot_delete_all_versions(tmp_path: Path) -> None:
    """Only services may call DeleteVersions; a tenant's call is refused."""
    async with serving(tmp_path) as service:
        request = version_service_pb2.DeleteVersionsRequest(adapter_id='ad-1')
        call = service.versions.DeleteVersions(request, metadata=as_tenant('alice'))
        assert (await failure_of(call)).reason == 'SCOPE_MISSING'


@pytest.mark.parametrize('limit', [resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE], ids=['descriptors', 'file size'])
async def test_save_that_cannot_be_stored_is_refused(tmp_path: Path, limit: int) -> None:
    """A save without free descriptors or above the file size limit is refused, leaves no files and can be repeated."""
    async with _process(tmp_path) as (pid, streams):
        frames = publish_frames(make_state(1), checkpoint=weights_pb2.CheckpointTarget(name='first'))
        await streams.Publish(stream_of(*frames))
        before = resource.prlimit(pid, limit)
        lowered = _first_free_descriptor(pid) if limit == resource.RLIMIT_NOFILE else 1024
        resource.prlimit(pid, limit, (lowered, before[1]))
        frames = publish_frames(make_state(2), checkpoint=weights_pb2.CheckpointTarget(name='second'))
        failure = await failure_of(streams.Publish(stream_of(*frames)))
        assert (failure.code, failure.reason) == ('UNAVAILABLE', 'STORE_UNAVAILABLE')
        resource.prlimit(pid, limit, before)
        assert _files(tmp_path, 'second') == []
        await streams.Publish(stream_of(*frames))


async def test_service_raises_its_limit_of_descriptors(tmp_path: Path) -> None:
    """A service raises its soft limit of descriptors to the hard limit, but to at most 2**20."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        async with _process(tmp_path) as (pid, _):
            soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            assert soft == min(hard, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE])
async def test_errors_of_a_disk_that_cannot_be_used_are_refusals(number: int) -> None:
    """A full or unusable disk gives STORE_UNAVAILABLE, and the operation's number can be used again."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    threads = StoreThreads('store', count=1)
    with pytest.raises(StoreUnavailable) as refused:
        await threads.run(fail)
    assert refused.value.disposition.frees_number
    threads.close()


@asynccontextmanager
async def _process(
    folder: Path,
) -> AsyncIterator[tuple[int, weight_stream_service_pb2_grpc.WeightStreamServiceStub]]:
    """Run the service as a process, and connect to it on behalf of Alice."""
    service = await ServiceProcess.start(folder)
    channel = open_channel(service.address)
    try:
        with acting_for(ALICE):
            yield service.pid, weight_stream_service_pb2_grpc.WeightStreamServiceStub(channel)
    finally:
        await channel.close()
        await service.stop()


def _files(state_dir: Path, name: str) -> list[Path]:
    """Return a checkpoint's files. Its empty folder may remain, because removing it needs a free descriptor."""
    return list(state_dir.glob(f'checkpoint/states/*/*/weights/{name}/*/*'))


def _descriptors(process: int | str) -> set[int]:
    return {int(path.name) for path in Path(f'/proc/{process}/fd').iterdir()}


def _first_free_descriptor(pid: int) -> int:
    used = _descriptors(pid)
    return next(number for number in range(len(used) + 1) if number not in used)


def _memory_segments(state_dir: Path) -> int:
    return len(list(state_dir.glob('memory/keep.*')))
