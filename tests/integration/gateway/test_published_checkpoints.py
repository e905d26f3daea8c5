"""Tests of publishing checkpoints with Twinkle's own API, with a real checkpoint service."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fixtures.running_gateway import bearer, failure_of
from fixtures.tinker_catalogue import RUN, TinkerCatalogue, tinker_catalogue
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, checkpoint_service_pb2_grpc
from twinkle.api.gateway.v1 import catalogue_service_pb2 as messages
from twinkle.api.gateway.v1 import catalogue_service_pb2_grpc

PATH = f'twinkle://{RUN}/weights/best'


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[TinkerCatalogue]:
    """A gateway with one checkpoint of Alice."""
    async with tinker_catalogue(tmp_path) as running:
        await running.save('best')
        yield running


async def test_public_checkpoint_is_readable_by_all_and_changed_only_by_its_owner(api: TinkerCatalogue) -> None:
    """Another tenant can read a checkpoint while it is public, but can never publish or unpublish it."""
    catalogue = catalogue_service_pb2_grpc.CatalogueServiceStub(api.gateway.channel)
    checkpoints = checkpoint_service_pb2_grpc.CheckpointServiceStub(api.gateway.channel)
    alice, bob = bearer(api.keys['alice']), bearer(api.keys['bob'])
    publish = messages.PublishCheckpointRequest(checkpoint_path=PATH)
    unpublish = messages.UnpublishCheckpointRequest(checkpoint_path=PATH)
    get = checkpoint_service_pb2.GetCheckpointRequest(checkpoint_path=PATH)
    assert (await failure_of(catalogue.PublishCheckpoint(publish, metadata=bob))).reason == 'CHECKPOINT_NOT_FOUND'
    await catalogue.PublishCheckpoint(publish, metadata=alice)
    assert (await checkpoints.GetCheckpoint(get, metadata=bob)).checkpoint.is_public
    assert (await failure_of(catalogue.UnpublishCheckpoint(unpublish, metadata=bob))).reason == 'CHECKPOINT_NOT_FOUND'
    listed = await catalogue.ListRunCheckpoints(messages.ListRunCheckpointsRequest(), metadata=alice)
    assert [item.is_public for item in listed.checkpoints] == [True]
    await catalogue.UnpublishCheckpoint(unpublish, metadata=alice)
    assert (await failure_of(checkpoints.GetCheckpoint(get, metadata=bob))).reason == 'CHECKPOINT_NOT_FOUND'


async def test_publication_needs_the_scope_train(api: TinkerCatalogue) -> None:
    """A key without the scope `train` cannot publish a checkpoint."""
    key = await api.gateway.make_key('alice', scopes=(2,))
    catalogue = catalogue_service_pb2_grpc.CatalogueServiceStub(api.gateway.channel)
    publish = messages.PublishCheckpointRequest(checkpoint_path=PATH)
    call = catalogue.PublishCheckpoint(publish, metadata=bearer(key.secret))
    assert (await failure_of(call)).reason == 'SCOPE_MISSING'
