"""Public checkpoints, which every tenant may read and copy."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import ALICE, BOB, Running, as_tenant, failure_of, make_state, serving
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2 as messages
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2_grpc, weights_pb2
from twinkle.checkpoint_engine import PackedState
from twinkle_services.checkpoint.application.checkpoints import Checkpoints
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.rpc.context import acting_for

PATH = 'twinkle://ad-1/weights/best'
STATE = make_state(1, is_trainer_included=True)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    """A service that stores one checkpoint of Alice."""
    async with serving(tmp_path) as running:
        await _save(running, STATE)
        yield running


async def _save(service: Running, state: PackedState, *, caller: Any = ALICE, **target: Any) -> Any:
    with acting_for(caller):
        return await service.weights.save_checkpoint('ad-1', state, weights_pb2.CheckpointTarget(name='best', **target))


def _internal_stub(service: Running) -> checkpoint_service_pb2_grpc.CheckpointServiceStub:
    return checkpoint_service_pb2_grpc.CheckpointServiceStub(service.channel)


async def _set_visibility(service: Running, *, is_public: bool, caller: Any = ALICE) -> Any:
    with acting_for(caller):
        request = messages.SetCheckpointVisibilityRequest(checkpoint_path=PATH, is_public=is_public)
        return (await _internal_stub(service).SetCheckpointVisibility(request)).checkpoint


async def _copy(service: Running, *, caller: Any = BOB, **fields: Any) -> Any:
    with acting_for(caller):
        values: dict[str, Any] = {'checkpoint_path': PATH, 'adapter_id': 'ad-copy', 'name': 'mine', **fields}
        request = messages.CopyCheckpointRequest(**values)
        return (await _internal_stub(service).CopyCheckpoint(request)).checkpoint


def _reads(service: Running) -> list[Any]:
    metadata = as_tenant('bob')
    return [
        service.checkpoints.GetCheckpoint(messages.GetCheckpointRequest(checkpoint_path=PATH), metadata=metadata),
        service.checkpoints.DownloadCheckpoint(
            messages.DownloadCheckpointRequest(checkpoint_path=PATH), metadata=metadata
        ),
    ]


async def _fetch(service: Running, caller: Any) -> bytes:
    with acting_for(caller):
        return bytes((await service.weights.fetch_checkpoint(PATH)).state.data)


async def test_public_checkpoint_is_read_by_every_tenant_until_it_is_private(service: Running) -> None:
    """Another tenant can read a checkpoint while it is public, but does not see its folder."""
    for call in _reads(service):
        assert (await failure_of(call)).reason == 'CHECKPOINT_NOT_FOUND'
    assert (await _set_visibility(service, is_public=True)).is_public
    get, download = _reads(service)
    found = (await get).checkpoint
    assert found.is_public
    assert found.folder == ''
    assert sum([len(piece.chunk.data) async for piece in download]) > STATE.manifest.weights_size_bytes
    assert await _fetch(service, BOB) == bytes(STATE.data)
    assert not (await _set_visibility(service, is_public=False)).is_public
    for call in _reads(service):
        assert (await failure_of(call)).reason == 'CHECKPOINT_NOT_FOUND'


async def test_public_checkpoint_survives_a_restart_and_its_replacement_is_private(tmp_path: Path) -> None:
    """A checkpoint stays public after a restart, but its replacement is private."""
    async with serving(tmp_path) as service:
        await _save(service, STATE)
        await _set_visibility(service, is_public=True)
    async with serving(tmp_path) as service:
        assert await _fetch(service, BOB) == bytes(STATE.data)
        await _save(service, make_state(2), is_overwrite_allowed=True)
        assert (await failure_of(_reads(service)[0])).reason == 'CHECKPOINT_NOT_FOUND'


async def test_only_the_owner_lists_and_changes_a_public_checkpoint(service: Running) -> None:
    """Another tenant cannot list, delete or change a public checkpoint."""
    await _set_visibility(service, is_public=True)
    bob = as_tenant('bob')
    listed = await service.checkpoints.ListCheckpoints(messages.ListCheckpointsRequest(), metadata=bob)
    assert not listed.checkpoints
    for call in (
        service.checkpoints.DeleteCheckpoint(messages.DeleteCheckpointRequest(checkpoint_path=PATH), metadata=bob),
        service.checkpoints.SetCheckpointTtl(messages.SetCheckpointTtlRequest(checkpoint_path=PATH), metadata=bob),
        _set_visibility(service, is_public=False, caller=BOB),
    ):
        assert (await failure_of(call)).reason == 'CHECKPOINT_NOT_FOUND'


async def test_own_checkpoint_takes_precedence_over_a_public_one(service: Running) -> None:
    """A tenant reads its own checkpoint instead of a public one with the same path, and cannot publish it."""
    await _set_visibility(service, is_public=True)
    own = make_state(3)
    await _save(service, own, caller=BOB)
    assert await _fetch(service, BOB) == bytes(own.data)
    assert (await failure_of(_set_visibility(service, is_public=True, caller=BOB))).reason == 'ID_TAKEN'


async def test_copy_has_the_complete_state_and_is_private(service: Running) -> None:
    """A copy is complete and private, and a repeated request returns it. A copy needs read access to the original."""
    assert (await failure_of(_copy(service))).reason == 'CHECKPOINT_NOT_FOUND'
    await _set_visibility(service, is_public=True)
    first, repeated = await _copy(service), await _copy(service)
    assert first == repeated
    assert first.path == 'twinkle://ad-copy/weights/mine'
    assert first.is_optimizer_included
    assert not first.is_public
    assert first.digest == STATE.manifest.digest
    await _save(service, make_state(4), is_overwrite_allowed=True)
    assert (await failure_of(_copy(service, caller=ALICE, checkpoint_path=first.path))).reason == 'CHECKPOINT_NOT_FOUND'


async def test_clients_may_not_publish_or_copy_directly(service: Running) -> None:
    """A client may not change the visibility of a checkpoint or copy a checkpoint directly."""
    alice = as_tenant('alice')
    visibility = messages.SetCheckpointVisibilityRequest(checkpoint_path=PATH, is_public=True)
    copy = messages.CopyCheckpointRequest(checkpoint_path=PATH, adapter_id='ad-2', name='x')
    for call in (
        service.checkpoints.SetCheckpointVisibility(visibility, metadata=alice),
        service.checkpoints.CopyCheckpoint(copy, metadata=alice),
    ):
        assert (await failure_of(call)).reason == 'SCOPE_MISSING'


async def test_expired_public_checkpoint_is_not_found(tmp_path: Path) -> None:
    """Another tenant does not find an expired public checkpoint, and the next sweep deletes it."""
    clock = FakeClock()
    async with serving(tmp_path, clock=clock) as service:
        await _save(service, STATE, ttl=timedelta(seconds=5))
        await _set_visibility(service, is_public=True)
        clock.advance(timedelta(seconds=6))
        assert (await failure_of(_reads(service)[0])).reason == 'CHECKPOINT_NOT_FOUND'
        assert await Checkpoints(service.registry).delete_expired() == 1
        assert not [folder for folder in service.stored_folders() if 'weights/best' in folder]
