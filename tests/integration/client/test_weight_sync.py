"""A sampler is synchronized with an adapter in training, through the client."""

import grpc
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import RUN_ID, failure
from twinkle_client import StateError, TwinkleClient
from twinkle_client.checkpoint_engine import CheckpointEngineManager
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler


async def create_pair(client: TwinkleClient) -> tuple[MultiLoraTransformersModel, Sampler, CheckpointEngineManager]:
    """Return a model handle with one adapter, a sampler, and the manager that synchronizes them."""
    model = MultiLoraTransformersModel('tiny', client=client)
    await model.add_adapter_to_model.aio('policy')
    sampler = Sampler('tiny', client=client)
    return model, sampler, CheckpointEngineManager(model=model, sampler=sampler)


async def test_sync_loads_the_published_version(gateway: FakeGateway, client: TwinkleClient) -> None:
    """The sampler loads the published version, which becomes the default for later requests."""
    _, sampler, manager = await create_pair(client)
    synced = await manager.sync_weights.aio(merge_and_sync=False, dtype='bfloat16')
    (load,) = gateway.calls['LoadAdapter']
    assert (load.adapter.adapter_id, load.adapter.exact) == (synced.adapter_id, synced.version) == (RUN_ID, 7)
    await sampler.sample.aio('a')
    await sampler.sample.aio('a', min_version=2)
    await sampler.sample.aio('a', use_base_model=True)
    exact, at_least, base = [request.adapter for request in gateway.calls['SampleBatch']]
    assert (exact.adapter_id, exact.exact) == (RUN_ID, 7)
    assert (at_least.adapter_id, at_least.at_least) == (RUN_ID, 2)
    assert not base.adapter_id
    with pytest.raises(ValueError, match='use_base_model'):
        await sampler.sample.aio('a', None, 'policy', use_base_model=True)


async def test_refused_version_does_not_become_the_default(gateway: FakeGateway, client: TwinkleClient) -> None:
    """The default version of a sampler changes only after the sampler has loaded the new version."""
    _, sampler, manager = await create_pair(client)
    gateway.fail('LoadAdapter', failure(grpc.StatusCode.FAILED_PRECONDITION, 'ADAPTER_NOT_READY'))
    with pytest.raises(StateError):
        await manager.sync_weights.aio()
    await sampler.sample.aio('a')
    assert not gateway.calls['SampleBatch'][-1].adapter.adapter_id


async def test_several_synced_adapters_need_a_name(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A request without a name is refused once several adapters have been synchronized."""
    _, sampler, manager = await create_pair(client)
    await manager.sync_weights.aio(merge_and_sync=False)
    sampler.note_synced('ad-other', 1)
    with pytest.raises(ValueError, match='adapter_name'):
        await sampler.sample.aio('a')


async def test_unknown_platform_is_refused(client: TwinkleClient) -> None:
    """An unknown platform raises ValueError, as in the library's class of the same name."""
    model, sampler, _ = await create_pair(client)
    with pytest.raises(ValueError, match='TPU'):
        CheckpointEngineManager(model, sampler, platform='TPU')
