"""The checkpoint service over loopback: save, get, list, download, delete, expire and watch checkpoints."""

import io
import random
import tarfile
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import duration_pb2

from fixtures.checkpoint_service import ALICE, BOB, Running, as_tenant, failure_of, make_state, serving, stream_of
from twinkle.api.checkpoint.v1 import checkpoint_pb2, checkpoint_service_pb2_grpc, weights_pb2
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2 as wire
from twinkle.checkpoint_engine import (
    chunk_checksum,
    read_peft_folder,
    unpack_state,
)
from twinkle_services.checkpoint.application.checkpoints import Checkpoints
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.rpc.context import acting_for

ALICE_CALLS = as_tenant('alice')
MIB = 1 << 20


@pytest.fixture
def clock() -> FakeClock:
    """A clock that a test advances."""
    return FakeClock()


@pytest.fixture
async def service(tmp_path: Path, clock: FakeClock) -> AsyncIterator[Running]:
    """A service with an empty store; calls are made for Alice by default."""
    async with serving(tmp_path, clock=clock, state_limit_bytes=64 * MIB) as running:
        with acting_for(ALICE):
            yield running


async def _save(service: Running, name: str, *, seed: int = 1, adapter_id: str = 'ad-1', **target: Any) -> Any:
    state = make_state(seed, is_trainer_included=True)
    response = await service.weights.save_checkpoint(
        adapter_id, state, weights_pb2.CheckpointTarget(name=name, **target)
    )
    return response.checkpoint


async def _get(service: Running, path: str) -> checkpoint_pb2.Checkpoint:
    request = wire.GetCheckpointRequest(checkpoint_path=path)
    return (await service.checkpoints.GetCheckpoint(request, metadata=ALICE_CALLS)).checkpoint


async def _archive(service: Running, path: str, *, offset: int = 0) -> bytes:
    request = wire.DownloadCheckpointRequest(checkpoint_path=path, offset=offset)
    data = bytearray()
    async for response in service.checkpoints.DownloadCheckpoint(request, metadata=ALICE_CALLS):
        assert response.chunk.offset == offset + len(data)
        assert chunk_checksum(response.chunk.data) == response.chunk.checksum
        data += response.chunk.data
        assert response.archive_size_bytes % tarfile.BLOCKSIZE == 0
    return bytes(data)


async def test_saved_checkpoint_is_found_by_path_and_id_and_loads_from_its_folder(service: Running) -> None:
    """A saved checkpoint is found by path and id, and its folder is a PEFT folder with the same weights."""
    saved = await _save(service, 'final', step_count=12)
    assert await _get(service, 'twinkle://ad-1/weights/final') == saved == await _get(service, 'ad-1/weights/final')
    assert (saved.base_model, saved.is_optimizer_included, saved.step_count) == ('org/tiny', True, 12)
    state = make_state(1)
    assert read_peft_folder(saved.folder) == (unpack_state(state.manifest, state.data), state.manifest.lora_config)


async def test_list_pages_newest_first_and_by_run(service: Running, clock: FakeClock) -> None:
    """Checkpoints are listed in pages, newest first, for one run or for all runs, and only for their tenant."""
    for index in range(5):
        await _save(service, f'step-{index}', adapter_id=f'ad-{index % 2}')
        clock.advance(timedelta(seconds=1))
    request = wire.ListCheckpointsRequest(page_size=2)
    names: list[str] = []
    while True:
        response = await service.checkpoints.ListCheckpoints(request, metadata=ALICE_CALLS)
        names += [checkpoint.name for checkpoint in response.checkpoints]
        request.page_token = response.next_page_token
        if not request.page_token:
            break
    assert names == ['step-4', 'step-3', 'step-2', 'step-1', 'step-0']
    request = wire.ListCheckpointsRequest(adapter_id='ad-1')
    response = await service.checkpoints.ListCheckpoints(request, metadata=ALICE_CALLS)
    assert [checkpoint.name for checkpoint in response.checkpoints] == ['step-3', 'step-1']
    response = await service.checkpoints.ListCheckpoints(request, metadata=as_tenant('bob'))
    assert not response.checkpoints


async def test_deleted_checkpoint_is_removed_from_disk(service: Running) -> None:
    """A deleted checkpoint is removed from disk; deleting it again fails with "not found"."""
    await _save(service, 'final')
    request = wire.DeleteCheckpointRequest(checkpoint_path='ad-1/weights/final')
    await service.checkpoints.DeleteCheckpoint(request, metadata=ALICE_CALLS)
    assert not service.stored_folders()
    failure = await failure_of(service.checkpoints.DeleteCheckpoint(request, metadata=ALICE_CALLS))
    assert (failure.code, failure.reason) == ('NOT_FOUND', 'CHECKPOINT_NOT_FOUND')


async def test_expired_checkpoint_is_not_found_and_is_deleted_later(service: Running, clock: FakeClock) -> None:
    """An expired checkpoint is not found, and the next sweep deletes it; other checkpoints are kept."""
    await _save(service, 'short', ttl=duration_pb2.Duration(seconds=60))
    await _save(service, 'kept', ttl=duration_pb2.Duration(seconds=60))
    request = wire.SetCheckpointTtlRequest(checkpoint_path='ad-1/weights/kept')
    changed = (await service.checkpoints.SetCheckpointTtl(request, metadata=ALICE_CALLS)).checkpoint
    assert not changed.HasField('expire_time')
    clock.advance(timedelta(seconds=60))
    failure = await failure_of(_get(service, 'ad-1/weights/short'))
    assert failure.reason == 'CHECKPOINT_NOT_FOUND'
    assert len(service.stored_folders()) == 2
    assert await Checkpoints(service.registry).delete_expired() == 1
    assert len(service.stored_folders()) == 1
    assert (await _get(service, 'ad-1/weights/kept')).name == 'kept'


async def test_download_is_a_tar_of_the_peft_folder(service: Running, tmp_path: Path) -> None:
    """A download contains the PEFT files, and does not contain the trainer's state."""
    await _save(service, 'final')
    with tarfile.open(fileobj=io.BytesIO(await _archive(service, 'ad-1/weights/final'))) as archive:
        assert sorted(archive.getnames()) == ['README.md', 'adapter_config.json', 'adapter_model.safetensors']
        archive.extractall(tmp_path / 'out', filter='data')
    state = make_state(1)
    assert read_peft_folder(tmp_path / 'out')[0] == unpack_state(state.manifest, state.data)


async def test_folders_are_shown_only_if_the_operator_allows_it(tmp_path: Path) -> None:
    """No result contains a checkpoint's folder if `are_folders_shown` is false, even after a restart."""
    state_dir = tmp_path / 'private'
    for name in ('first', 'second'):
        async with serving(state_dir, are_folders_shown=False) as service:
            with acting_for(ALICE):
                saved = await _save(service, name)
                path = saved.path
                request = wire.ListCheckpointsRequest(adapter_id='ad-1')
                listed = (await service.checkpoints.ListCheckpoints(request, metadata=ALICE_CALLS)).checkpoints
                verify = wire.VerifyCheckpointRequest(checkpoint_path=path)
                verified = (await service.checkpoints.VerifyCheckpoint(verify, metadata=ALICE_CALLS)).checkpoint
                found = [saved, await _get(service, path), verified, *listed]
                assert [item.folder for item in found] == [''] * len(found)
                assert str(tmp_path) not in str(found)


@pytest.mark.parametrize('seed', range(10))
async def test_download_resumes_at_any_byte(service: Running, seed: int) -> None:
    """A download from a random byte contains exactly the remaining bytes of the archive."""
    await _save(service, 'final')
    whole = await _archive(service, 'ad-1/weights/final')
    cut = random.Random(seed).randrange(len(whole) + 1)
    assert await _archive(service, 'ad-1/weights/final', offset=cut) == whole[cut:]


async def test_watch_sends_the_snapshot_then_changes_and_resumes(service: Running, clock: FakeClock) -> None:
    """A watch sends all tenants' checkpoints, then changes; with a resume token, it starts after the token's event."""
    await _save(service, 'one')
    with acting_for(BOB):
        await _save(service, 'two')
    stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(service.channel)
    call = stub.WatchCheckpoints(wire.WatchCheckpointsRequest())
    seen = [await call.read() for _ in range(3)]
    assert [(event.tenant_id, event.checkpoint.name, event.is_synced) for event in seen] == [
        ('alice', 'one', False),
        ('bob', 'two', False),
        ('', '', True),
    ]
    await _save(service, 'three', ttl=duration_pb2.Duration(seconds=9))
    event = await call.read()
    assert (event.tenant_id, event.checkpoint.path) == ('alice', 'twinkle://ad-1/weights/three')
    request = wire.DeleteCheckpointRequest(checkpoint_path='ad-1/weights/one')
    await service.checkpoints.DeleteCheckpoint(request, metadata=ALICE_CALLS)
    assert (await call.read()).deletion.checkpoint_id == 'ad-1/weights/one'
    call.cancel()
    clock.advance(timedelta(seconds=9))
    await Checkpoints(service.registry).delete_expired()
    call = stub.WatchCheckpoints(wire.WatchCheckpointsRequest(resume_token=event.resume_token))
    resumed = [await call.read() for _ in range(3)]
    assert [event.deletion.checkpoint_id for event in resumed] == ['ad-1/weights/one', 'ad-1/weights/three', '']
    assert resumed[-1].is_synced
    call.cancel()


@pytest.mark.parametrize('token', ['x', 'ep-1.5', '.', 'a.b'])
async def test_watch_refuses_unknown_resume_tokens(service: Running, token: str) -> None:
    """A resume token that this process did not issue is refused."""
    stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(service.channel)
    failure = await failure_of(stub.WatchCheckpoints(wire.WatchCheckpointsRequest(resume_token=token)))
    assert (failure.code, failure.field) == ('INVALID_ARGUMENT', 'resume_token')


async def test_clients_may_not_watch(service: Running) -> None:
    """A client may not watch, because a watch covers all tenants."""
    call = service.checkpoints.WatchCheckpoints(wire.WatchCheckpointsRequest(), metadata=ALICE_CALLS)
    assert (await failure_of(call)).code == 'PERMISSION_DENIED'


BY_PATH = {
    'GetCheckpoint': wire.GetCheckpointRequest,
    'DeleteCheckpoint': wire.DeleteCheckpointRequest,
    'SetCheckpointTtl': wire.SetCheckpointTtlRequest,
    'DownloadCheckpoint': wire.DownloadCheckpointRequest,
}


@pytest.mark.parametrize('method', BY_PATH)
async def test_foreign_and_malformed_paths_are_not_found(service: Running, method: str) -> None:
    """The error for another tenant's path and for a malformed path is "not found"; an empty path is invalid."""
    await _save(service, 'final')
    call = getattr(service.checkpoints, method)
    foreign = await failure_of(call(BY_PATH[method](checkpoint_path='ad-1/weights/final'), metadata=as_tenant('bob')))
    missing = await failure_of(call(BY_PATH[method](checkpoint_path='ad-1/weights/other'), metadata=ALICE_CALLS))
    assert (foreign.code, foreign.reason) == (missing.code, missing.reason) == ('NOT_FOUND', 'CHECKPOINT_NOT_FOUND')
    assert foreign.message == missing.message.replace('other', 'final')
    for path in ('x', 'twinkle://ad-1', 'ad-1/weights/../../x', 'twinkle://ad-1/weights/', 'file:///etc/passwd'):
        failure = await failure_of(call(BY_PATH[method](checkpoint_path=path), metadata=ALICE_CALLS))
        assert failure.reason == 'CHECKPOINT_NOT_FOUND'
    failure = await failure_of(call(BY_PATH[method](), metadata=ALICE_CALLS))
    assert (failure.code, failure.field) == ('INVALID_ARGUMENT', 'checkpoint_path')


@pytest.mark.parametrize(
    ('method', 'request_', 'field'),
    [
        ('SetCheckpointTtl', wire.SetCheckpointTtlRequest(ttl=duration_pb2.Duration(seconds=-1)), 'ttl'),
        ('SetCheckpointTtl', wire.SetCheckpointTtlRequest(ttl=duration_pb2.Duration()), 'ttl'),
        ('SetCheckpointTtl', wire.SetCheckpointTtlRequest(ttl=duration_pb2.Duration(seconds=1 << 40)), 'ttl'),
        ('DownloadCheckpoint', wire.DownloadCheckpointRequest(offset=-1), 'offset'),
        ('DownloadCheckpoint', wire.DownloadCheckpointRequest(offset=1 << 40), 'offset'),
        ('ListCheckpoints', wire.ListCheckpointsRequest(page_size=-1), 'page_size'),
        ('ListCheckpoints', wire.ListCheckpointsRequest(adapter_id='a/b'), 'adapter_id'),
    ],
)
async def test_bad_fields_are_named(service: Running, method: str, request_: Any, field: str) -> None:
    """The error for an invalid field names the field, and the checkpoint stays unchanged."""
    saved = await _save(service, 'final')
    if method != 'ListCheckpoints':
        request_.checkpoint_path = saved.path
    failure = await failure_of(getattr(service.checkpoints, method)(request_, metadata=ALICE_CALLS))
    assert (failure.code, failure.field) == ('INVALID_ARGUMENT', field)
    assert await _get(service, saved.path) == saved


@pytest.mark.parametrize('method', ['DeleteCheckpoint', 'SetCheckpointTtl', 'UploadCheckpoint'])
async def test_changes_need_the_scope(service: Running, method: str) -> None:
    """A key with only the scope `sample` may not change checkpoints."""
    await _save(service, 'final')
    argument = stream_of() if method == 'UploadCheckpoint' else BY_PATH[method](checkpoint_path='ad-1/weights/final')
    call = getattr(service.checkpoints, method)(argument, metadata=as_tenant('alice', scopes='sample'))
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == ('PERMISSION_DENIED', 'SCOPE_MISSING')
