"""The client's way of keeping a sampler in step with a trainer."""

import grpc
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import RUN_ID, failure
from twinkle_client import StateError, TwinkleClient
from twinkle_client.checkpoint_engine import CheckpointEngineManager
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler


async def connected(client: TwinkleClient) -> tuple[MultiLoraTransformersModel, Sampler, CheckpointEngineManager]:
    """Return a trainer with one adapter, a sampler, and what connects them."""
    model = MultiLoraTransformersModel('tiny', client=client)
    await model.add_adapter_to_model.aio('policy')
    sampler = Sampler('tiny', client=client)
    return model, sampler, CheckpointEngineManager(model=model, sampler=sampler)


async def test_sync_publishes_and_loads_exactly_that_version(gateway: FakeGateway, client: TwinkleClient) -> None:
    """The sampler is asked for the version that was published, and requests without a name then mean it."""
    _, sampler, manager = await connected(client)
    synced = await manager.sync_weights.aio(merge_and_sync=False, dtype='bfloat16')
    (load,) = gateway.calls['LoadAdapter']
    assert (load.adapter.adapter_id, load.adapter.exact) == (synced.adapter_id, synced.version) == (RUN_ID, 7)
    await sampler.sample.aio('a')
    await sampler.sample.aio('a', min_version=2)
    await sampler.sample.aio('a', use_base_model=True)
    exact, least, base = [request.adapter for request in gateway.calls['SampleBatch']]
    assert (exact.adapter_id, exact.exact) == (RUN_ID, 7)
    assert (least.adapter_id, least.at_least) == (RUN_ID, 2)
    assert not base.adapter_id
    with pytest.raises(ValueError, match='use_base_model'):
        await sampler.sample.aio('a', None, 'policy', use_base_model=True)


async def test_a_sampler_that_refuses_the_version_keeps_the_old_one(
    gateway: FakeGateway, client: TwinkleClient
) -> None:
    """Nothing is noted before the sampler has the weights: the base model still answers."""
    _, sampler, manager = await connected(client)
    gateway.fail('LoadAdapter', failure(grpc.StatusCode.FAILED_PRECONDITION, 'ADAPTER_NOT_READY'))
    with pytest.raises(StateError):
        await manager.sync_weights.aio()
    await sampler.sample.aio('a')
    assert not gateway.calls['SampleBatch'][-1].adapter.adapter_id


async def test_several_synced_adapters_have_to_be_named(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Nobody guesses which of them is meant."""
    _, sampler, manager = await connected(client)
    await manager.sync_weights.aio(merge_and_sync=False)
    sampler.note_synced('ad-other', 1)
    with pytest.raises(ValueError, match='adapter_name'):
        await sampler.sample.aio('a')


async def test_a_platform_that_there_is_not_is_refused(client: TwinkleClient) -> None:
    """As by the library's class of that name."""
    model, sampler, _ = await connected(client)
    with pytest.raises(ValueError, match='TPU'):
        CheckpointEngineManager(model, sampler, platform='TPU')
