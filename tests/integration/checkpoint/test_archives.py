"""Tests of archive downloads, and of the labels, expiry and publication of checkpoints."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from fixtures.checkpoint_service import ALICE, BOB, Running, as_tenant, failure_of, make_state, serving
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2 as wire
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2_grpc, weights_pb2
from twinkle_services.checkpoint.application.checkpoints import Checkpoints
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.rpc.context import acting_for

PATH = 'twinkle://ad-1/weights/best'
MIB = 1 << 20


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    """A service with an empty store; calls are made for Alice by default."""
    async with serving(tmp_path) as running:
        with acting_for(ALICE):
            yield running


async def save(service: Running, *, seed: int = 1, size_bytes: int = 4096, **fields: Any) -> None:
    target = weights_pb2.CheckpointTarget(name='best', **fields)
    await service.weights.save_checkpoint('ad-1', make_state(seed, size_bytes=size_bytes), target)


async def set_public(service: Running, caller: Caller, *, is_public: bool) -> None:
    """Make a tenant's checkpoint public or private."""
    with acting_for(caller):
        stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(service.channel)
        request = wire.SetCheckpointVisibilityRequest(checkpoint_path=PATH, is_public=is_public)
        await stub.SetCheckpointVisibility(request)


async def download(service: Running, offset: int = 0) -> tuple[bytes, set[str]]:
    """Return an archive from byte `offset` on, and the set of digests in the responses."""
    request = wire.DownloadCheckpointRequest(checkpoint_path=PATH, offset=offset)
    pieces = [piece async for piece in service.checkpoints.DownloadCheckpoint(request, metadata=as_tenant('alice'))]
    return b''.join(piece.chunk.data for piece in pieces), {piece.archive_digest for piece in pieces}


async def test_archive_has_the_same_digest_at_every_offset(service: Running) -> None:
    """A download reports the digest of the whole archive at every offset, so a resumed download can be verified."""
    await save(service, size_bytes=3 * MIB)
    complete, digests = await download(service)
    assert digests == {blake3(complete).hexdigest()}
    for offset in (1, 700, 2 * MIB, len(complete) - 1, len(complete)):
        assert await download(service, offset) == (complete[offset:], digests)


async def test_an_archive_that_is_replaced_has_another_digest(service: Running, tmp_path: Path) -> None:
    """Overwriting a checkpoint changes the digest of its archive."""
    await save(service)
    before = await download(service)
    await save(service, seed=2, is_overwrite_allowed=True)
    after = await download(service)
    assert after[1] != before[1]


async def test_labels_and_rank_survive_a_restart(tmp_path: Path) -> None:
    """Labels and LoRA rank survive a restart; another tenant does not see the labels of a public checkpoint."""
    request = wire.GetCheckpointRequest(checkpoint_path=PATH)
    with acting_for(ALICE):
        async with serving(tmp_path) as service:
            await save(service, user_metadata={'note': 'the good one'})
        async with serving(tmp_path) as service:
            found = (await service.checkpoints.GetCheckpoint(request, metadata=as_tenant('alice'))).checkpoint
            assert (dict(found.user_metadata), found.lora_rank) == ({'note': 'the good one'}, 4)
            await set_public(service, ALICE, is_public=True)
            seen = (await service.checkpoints.GetCheckpoint(request, metadata=as_tenant('bob'))).checkpoint
            assert (dict(seen.user_metadata), seen.lora_rank) == ({}, 4)


async def test_an_expired_checkpoint_is_deleted_with_its_bytes_after_a_restart(tmp_path: Path) -> None:
    """A checkpoint that expired while the service was down is not served, and its files are deleted."""
    clock = FakeClock()
    with acting_for(ALICE):
        async with serving(tmp_path, clock=clock) as service:
            target = weights_pb2.CheckpointTarget(name='best')
            target.ttl.FromTimedelta(timedelta(seconds=5))
            await service.weights.save_checkpoint('ad-1', make_state(1), target)
            assert service.stored_folders()
        clock.advance(timedelta(seconds=5))
        async with serving(tmp_path, clock=clock) as service:
            assert (await failure_of(_get(service))).reason == 'CHECKPOINT_NOT_FOUND'
            await Checkpoints(service.registry).delete_expired()
            assert not service.stored_folders()
            listed = await service.checkpoints.ListCheckpoints(
                wire.ListCheckpointsRequest(), metadata=as_tenant('alice')
            )
            assert not listed.checkpoints


async def test_only_one_tenant_can_publish_a_path(service: Running) -> None:
    """If two tenants publish a checkpoint with the same path at the same time, exactly one of the calls succeeds."""
    await save(service)
    with acting_for(BOB):
        await save(service, seed=2)
    for _ in range(10):
        publish = [set_public(service, caller, is_public=True) for caller in (ALICE, BOB)]
        outcomes = await asyncio.gather(*publish, return_exceptions=True)
        assert sum(isinstance(outcome, BaseException) for outcome in outcomes) == 1
        for caller in (ALICE, BOB):
            await set_public(service, caller, is_public=False)


def _get(service: Running) -> Any:
    request = wire.GetCheckpointRequest(checkpoint_path=PATH)
    return service.checkpoints.GetCheckpoint(request, metadata=as_tenant('alice'))
