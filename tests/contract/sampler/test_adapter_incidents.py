"""Both engines avoid failures of adapters that other inference systems have had."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from fixtures.engine_requests import make_request, run, sampled_logprobs, score, settle
from fixtures.sampled import LORA, ONE, TWO, lora_tensors, lora_weights
from fixtures.sampler_engines import VLLM_SLOTS
from fixtures.sampler_service import FakeWeightSource
from fixtures.tiers import mostly_slow
from twinkle.data_format import TensorData
from twinkle_services.kit.caller import Caller
from twinkle_services.sampler.application.adapter_versions import AdapterVersions
from twinkle_services.sampler.application.versions_protocol import Retention
from twinkle_services.sampler.domain.adapter import AdapterChoice, AdapterWeights, VersionKey

pytestmark = pytest.mark.asyncio(loop_scope='session')

TEXT = tuple(3 + (7 * index) % 250 for index in range(60))


async def test_adapter_without_an_update_equals_the_base_model(real_engine):
    """An adapter that was never trained has exactly the base model's tokens and log-probabilities."""
    tensors = {
        name: TensorData.from_numpy(np.zeros(tensor.shape, np.float32)) if 'lora_B' in name else tensor
        for name, tensor in lora_tensors(7).items()
    }
    null = VersionKey(ONE.adapter, 70)
    await real_engine.load_adapter(null, lora_weights(70, tensors=tensors))
    np.testing.assert_array_equal(await score(real_engine, null, TEXT), await score(real_engine, None, TEXT))
    base = await run(real_engine, make_request('base', None, max_tokens=24, seed=3))
    found = await run(real_engine, make_request('null', null, max_tokens=24, seed=3))
    assert found.tokens == base.tokens
    np.testing.assert_array_equal(sampled_logprobs(found), sampled_logprobs(base))


@pytest.mark.parametrize('real_engine', mostly_slow(['torch', 'vllm']), indirect=True)
async def test_adapters_added_while_all_slots_run_change_no_token(real_engine):
    """Loading and sampling more adapters changes no token of running requests, even if these use every slot."""
    keys = [VersionKey(replace(ONE.adapter, name=f'ad-{slot}'), 1) for slot in range(40, 40 + VLLM_SLOTS)]
    for number, key in enumerate(keys):
        await real_engine.load_adapter(key, lora_weights(40 + number))
    requests = [make_request(f'slot {key.adapter.name}', key, max_tokens=160, temperature=0) for key in keys]
    alone = [(await run(real_engine, request)).tokens for request in requests]
    running = [asyncio.create_task(run(real_engine, request)) for request in requests]
    await settle(real_engine)
    added = [VersionKey(replace(ONE.adapter, name=f'ad-{slot}'), 1) for slot in range(50, 50 + 2 * VLLM_SLOTS)]
    for number, key in enumerate(added):
        await real_engine.load_adapter(key, lora_weights(50 + number))
    assert not any(task.done() for task in running)
    late = [make_request(f'late {key.adapter.name}', key, max_tokens=4, temperature=0) for key in added]
    await asyncio.gather(*(run(real_engine, request) for request in late))
    assert [(await task).tokens for task in running] == alone
    for key in (*keys, *added):
        await real_engine.unload_adapter(key)


SCALE = 3
"""Scale of the adapter `scaled`: alpha divided by r."""


def adapter_of_scale(name: str, scale: int) -> AdapterWeights:
    """Return an adapter whose effect does not depend on `scale`, because the factor B is divided by `scale`."""
    tensors = {
        path: TensorData.from_numpy(tensor.to_numpy() * np.float32(SCALE / scale)) if 'lora_B' in path else tensor
        for path, tensor in lora_tensors(9).items()
    }
    weights = lora_weights(1, adapter_id=name, tensors=tensors)
    return replace(weights, lora_config=replace(LORA, lora_alpha=scale * LORA.r))


@pytest_asyncio.fixture(loop_scope='session')
async def small_store(real_engine) -> AsyncIterator[AdapterVersions]:
    """Store with space for one version, whose source returns the same tensors at each fetch."""
    source = FakeWeightSource()
    for weights in (adapter_of_scale('scaled', SCALE), adapter_of_scale('unscaled', 1)):
        source.publish('alice', weights)
    store = AdapterVersions(real_engine, source, Retention(max_versions=1))
    yield store
    for resident in store.all_resident():
        await real_engine.unload_adapter(resident.key)
    await store.close()


async def test_scale_is_applied_once_after_each_reload(real_engine, small_store):
    """The scale of an adapter is applied exactly once, however often the adapter is evicted and loaded again."""

    async def score_of(name: str) -> np.ndarray:
        async with small_store.lease(Caller(tenant_id='alice'), AdapterChoice(adapter_id=name)) as version:
            assert [item.key for item in small_store.all_resident()] == [version.key]
            return await score(real_engine, version.key, TEXT)

    scaled = await score_of('scaled')
    np.testing.assert_allclose(scaled, await score_of('unscaled'), atol=1e-4)
    for _ in range(3):
        np.testing.assert_array_equal(await score_of('scaled'), scaled)
        for key in (ONE, TWO):
            # These versions occupy vLLM's slots, so the adapter must be copied into a slot again.
            await score(real_engine, key, TEXT)
        np.testing.assert_array_equal(await score_of('scaled'), scaled)
        await score_of('unscaled')
