"""Failures of other systems with adapters, as tests of both engines."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from fixtures.engine_requests import make_request, run, sampled_logprobs, score, settle
from fixtures.sampled import ONE, lora_tensors, lora_weights
from fixtures.sampler_engines import VLLM_SLOTS
from services.sampler.domain.adapter import VersionKey
from twinkle.data_format import TensorData

pytestmark = pytest.mark.asyncio(loop_scope='session')

TEXT = tuple(3 + (7 * index) % 250 for index in range(60))


async def test_adapter_without_an_update_equals_the_base_model(real_engine):
    """An adapter that was created and never trained has exactly the base model's tokens and log-probabilities."""
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


async def test_adapters_added_while_all_slots_run_change_no_token(real_engine):
    """Adapters loaded and sampled during a decode in which every slot is in use change no token of the others."""
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
