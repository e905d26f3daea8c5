"""Methods that read the stored files of checkpoints and versions report damage to a file or return correct bytes."""

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fixtures.checkpoint_service import ALICE, Running, as_tenant, failure_of, make_state, serving
from fixtures.damage import apply, damages_of
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2 as wire
from twinkle.api.checkpoint.v1 import (
    checkpoint_service_pb2_grpc,
    version_service_pb2,
    version_service_pb2_grpc,
    weight_stream_service_pb2,
    weights_pb2,
)
from twinkle_services.checkpoint.backends.disk import open_disk
from twinkle_services.checkpoint.backends.folder_store import FolderStore
from twinkle_services.checkpoint.domain import AdapterKey, NewestMark
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.store_threads import StoreThreads

PATH = 'twinkle://ad-1/weights/best'
STATE = make_state(1, is_trainer_included=True)
FILES = (
    'record.json',
    '*/b3sums',
    '*/manifest.json',
    '*/adapter_config.json',
    '*/adapter_model.safetensors',
    '*/trainer_state.safetensors',
)


def flip(path: Path, place: float) -> None:
    """Invert all bits of one byte of a file; `place` is the relative position of the byte."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0xFF
    path.write_bytes(content)


def truncate(path: Path, place: float) -> None:
    """Truncate a file at a relative position."""
    path.write_bytes(path.read_bytes()[: int(place * path.stat().st_size)])


def flip_a_bit(path: Path, place: float) -> None:
    """Invert the lowest bit of one byte, which often leaves a text readable."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize('name', FILES)
@pytest.mark.parametrize('damage', [flip, flip_a_bit, truncate])
async def test_damaged_checkpoint_is_refused_by_every_verb(
    tmp_path: Path, name: str, damage: Callable[[Path, float], None]
) -> None:
    """Methods that read the files fail with DATA_LOSS or return unchanged bytes; each service logs the damage once."""
    places = {'p0': 0.0, 'p1': 0.31, 'p2': 1.0}
    archives: dict[str, bytes] = {}
    async with serving(tmp_path) as service:
        with acting_for(ALICE), capture_logs() as lines:
            for checkpoint, place in places.items():
                await _save(service, checkpoint)
                archives[checkpoint] = await _downloaded(service, checkpoint)
                damage(_stored(tmp_path, name, checkpoint), place)
            await _assert_refused_or_equal(service, archives, lines)
    with capture_logs() as lines:
        async with serving(tmp_path) as service:
            with acting_for(ALICE):
                await _assert_refused_or_equal(service, archives, lines)


@pytest.mark.parametrize('name', FILES)
async def test_damaged_checkpoint_can_be_replaced_and_deleted(tmp_path: Path, name: str) -> None:
    """A save that allows overwriting replaces a damaged checkpoint, and a deletion removes it."""
    for is_deleted in (False, True):
        state_dir = tmp_path / str(is_deleted)
        async with serving(state_dir) as service:
            with acting_for(ALICE):
                await _save(service)
        flip(_stored(state_dir, name), 0.5)
        async with serving(state_dir) as service:
            with acting_for(ALICE):
                if is_deleted:
                    request = wire.DeleteCheckpointRequest(checkpoint_path=PATH)
                    await service.checkpoints.DeleteCheckpoint(request, metadata=as_tenant('alice'))
                target = weights_pb2.CheckpointTarget(name='best', is_overwrite_allowed=not is_deleted)
                await service.weights.save_checkpoint('ad-1', make_state(2), target)
                assert (await service.weights.fetch_checkpoint(PATH)).state == make_state(2)


async def test_checkpoint_with_a_damaged_record_stays_in_the_watch(tmp_path: Path) -> None:
    """The watch reports a checkpoint whose record is damaged, and later reports its deletion."""
    async with serving(tmp_path) as service:
        with acting_for(ALICE):
            await _save(service)
    flip(_stored(tmp_path, 'record.json'), 0.5)
    async with serving(tmp_path) as service:
        internal = checkpoint_service_pb2_grpc.CheckpointServiceStub(service.channel)
        call = internal.WatchCheckpoints(wire.WatchCheckpointsRequest())
        event = await call.read()
        assert (event.tenant_id, event.damaged_checkpoint_id) == ('alice', 'ad-1/weights/best')
        assert (await call.read()).is_synced
        request = wire.DeleteCheckpointRequest(checkpoint_path=PATH)
        await service.checkpoints.DeleteCheckpoint(request, metadata=as_tenant('alice'))
        assert (await call.read()).deletion.checkpoint_id == 'ad-1/weights/best'
        call.cancel()


async def test_damaged_version_is_refused(tmp_path: Path) -> None:
    """A version with a damaged file or record is refused with CHECKPOINT_DAMAGED, and its tenant can delete it."""
    for name in ('record.json', '*/adapter_model.safetensors'):
        state_dir = tmp_path / name.strip('*/')
        async with serving(state_dir) as service:
            with acting_for(ALICE):
                for version in (1, 2):
                    await service.weights.publish_version('ad-1', make_state(version), version=version)
        (path,) = state_dir.glob(f'checkpoint/states/alice/ad-1/versions/1/{name}')
        flip(path, 0.5)
        async with serving(state_dir) as service:
            with acting_for(ALICE):
                with pytest.raises(DomainError) as refused:
                    await service.weights.fetch_version('ad-1', 1)
                assert refused.value.reason == 'CHECKPOINT_DAMAGED'
                assert (await service.weights.fetch_version('ad-1', 2)).state == make_state(2)
                request = version_service_pb2.DeleteVersionRequest(adapter_id='ad-1', version=1)
                await service.versions.DeleteVersion(request, metadata=as_tenant('alice'))
                failure = await failure_of(service.versions.DeleteVersion(request, metadata=as_tenant('alice')))
                assert failure.reason == 'VERSION_NOT_FOUND'
                assert not (state_dir / 'checkpoint' / 'states' / 'alice' / 'ad-1' / 'versions' / '1').exists()


@pytest.mark.parametrize('first', [1, 2])
async def test_number_of_a_deleted_damaged_version_is_not_used_again(first: int, tmp_path: Path) -> None:
    """The number of a deleted damaged version is refused after a restart, even if it was the newest or only version."""
    async with serving(tmp_path) as service:
        with acting_for(ALICE):
            for version in range(first, 3):
                await service.weights.publish_version('ad-1', make_state(version), version=version)
    flip(tmp_path / 'checkpoint' / 'states' / 'alice' / 'ad-1' / 'versions' / '2' / 'record.json', 0.5)
    async with serving(tmp_path) as service:
        request = version_service_pb2.DeleteVersionRequest(adapter_id='ad-1', version=2)
        await service.versions.DeleteVersion(request, metadata=as_tenant('alice'))
        with acting_for(ALICE):
            internal = version_service_pb2_grpc.VersionServiceStub(service.channel)
            await internal.DeleteVersions(version_service_pb2.DeleteVersionsRequest(adapter_id='ad-1'))
    async with serving(tmp_path) as service:
        with acting_for(ALICE):
            with pytest.raises(DomainError) as refused:
                await service.weights.publish_version('ad-1', make_state(9), version=2)
            assert refused.value.reason == 'VERSION_CONFLICT'
            await service.weights.publish_version('ad-1', make_state(3), version=3)


async def test_damaged_mark_is_never_read_as_another_number(tmp_path: Path) -> None:
    """A damaged newest-version mark gives its original number, or is logged and ignored; a deleted mark is ignored."""
    key = AdapterKey('alice', 'ad-1')
    threads = StoreThreads('store', count=1)
    store = FolderStore(open_disk(str(tmp_path)), threads)
    await store.mark_newest(NewestMark(key, 107))
    path = _mark(tmp_path)
    undamaged = path.read_bytes()
    for damage, content in damages_of(path, flips=100):
        apply(path, content)
        with capture_logs() as lines:
            found = await store.load()
        named = [line for line in lines if line['event'] == 'newest-version mark damaged']
        assert found == [NewestMark(key, 107)] or (found == [] and (named or content is None)), damage
    path.write_bytes(undamaged)
    assert await store.load() == [NewestMark(key, 107)]
    threads.close()


async def test_numbers_continue_after_the_records_if_the_mark_is_damaged(tmp_path: Path) -> None:
    """A service with a damaged newest-version mark derives the newest number from the stored versions."""
    async with serving(tmp_path) as service:
        with acting_for(ALICE):
            for version in (1, 2, 3):
                await service.weights.publish_version(
                    'ad-1', make_state(version), version=version, is_pinned=version == 2
                )
            internal = version_service_pb2_grpc.VersionServiceStub(service.channel)
            await internal.DeleteVersions(version_service_pb2.DeleteVersionsRequest(adapter_id='ad-1'))
    flip_a_bit(_mark(tmp_path / 'checkpoint'), 0.7)
    for _ in range(2):
        async with serving(tmp_path) as service:
            with acting_for(ALICE):
                with pytest.raises(DomainError) as refused:
                    await service.weights.publish_version('ad-1', make_state(9), version=1)
                assert refused.value.reason == 'VERSION_CONFLICT'
                await service.weights.publish_version('ad-1', make_state(4), version=4)
                assert (await service.weights.fetch_version('ad-1')).state == make_state(4)


async def _save(service: Running, name: str = 'best') -> None:
    await service.weights.save_checkpoint('ad-1', STATE, weights_pb2.CheckpointTarget(name=name))


def _mark(folder: Path) -> Path:
    (path,) = folder.glob('states/alice/ad-1/newest.json')
    return path


def _stored(state_dir: Path, name: str, checkpoint: str = 'best') -> Path:
    (path,) = state_dir.glob(f'checkpoint/states/alice/ad-1/weights/{checkpoint}/{name}')
    return path


async def _assert_refused_or_equal(
    service: Running, archives: dict[str, bytes], lines: Sequence[MutableMapping[str, Any]]
) -> None:
    """Check that all methods refuse a checkpoint, and that it is logged once, or that all methods return it unchanged.

    Args:
        service: The service.
        archives: The archive of each checkpoint before the damage, by name.
        lines: Log lines since the service started.
    """
    refused = {name for name, archive in archives.items() if await _is_refused(service, name, archive)}
    logged = sorted(line['slot'] for line in lines if line['event'] == 'stored state damaged')
    assert logged == sorted(f'states/alice/ad-1/weights/{name}' for name in refused)


async def _is_refused(service: Running, name: str, archive: bytes) -> bool:
    """Return whether the methods that read a checkpoint's files refuse the checkpoint; check that all methods agree."""
    path = f'twinkle://ad-1/weights/{name}'
    internal = checkpoint_service_pb2_grpc.CheckpointServiceStub(service.channel)
    verify = wire.VerifyCheckpointRequest(checkpoint_path=path)
    if await _fetched(service, path):
        await service.checkpoints.VerifyCheckpoint(verify, metadata=as_tenant('alice'))
        assert await _downloaded(service, name) == archive
        return False
    download = wire.DownloadCheckpointRequest(checkpoint_path=path)
    calls: list[object] = [
        service.streams.Fetch(weight_stream_service_pb2.FetchRequest(checkpoint_path=path)),
        service.checkpoints.VerifyCheckpoint(verify, metadata=as_tenant('alice')),
        service.checkpoints.DownloadCheckpoint(download, metadata=as_tenant('alice')),
        internal.CopyCheckpoint(wire.CopyCheckpointRequest(checkpoint_path=path, adapter_id='ad-2', name=name)),
    ]
    for call in calls:
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == ('DATA_LOSS', 'CHECKPOINT_DAMAGED')
    return True


async def _downloaded(service: Running, name: str) -> bytes:
    request = wire.DownloadCheckpointRequest(checkpoint_path=f'twinkle://ad-1/weights/{name}')
    call = service.checkpoints.DownloadCheckpoint(request, metadata=as_tenant('alice'))
    return b''.join([bytes(response.chunk.data) async for response in call])


async def _fetched(service: Running, path: str) -> bool:
    """Return whether the checkpoint can be loaded, and check its bytes."""
    with suppress(DomainError):
        assert (await service.weights.fetch_checkpoint(path)).state == STATE
        return True
    return False
