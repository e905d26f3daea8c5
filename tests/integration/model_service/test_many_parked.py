"""Tests with many more adapters than fit into memory."""

import asyncio

import pytest

from fixtures.checkpoint_service import as_tenant
from fixtures.model_service import draw_example, forward_backward, serving_model
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2

pytestmark = pytest.mark.timeout(300)

ADAPTERS, RESIDENT = 300, 16
CONFIG = {'lora_config': {'lora_rank': 2, 'target_modules': ['q_proj'], 'seed': 5}}
BATCH = forward_backward([draw_example(8)])


@pytest.mark.slow
async def test_three_hundred_adapters_train_with_memory_for_sixteen(tiny_llama_dir, tmp_path):
    """The engine holds at most sixteen adapters, equal training gives equal results, and a list loads no adapter."""
    async with serving_model(tiny_llama_dir, tmp_path, max_resident_adapters=RESIDENT) as model:
        maximum = 0

        async def train(adapter_id: str, number: int):
            nonlocal maximum
            batch = await model.result(adapter_id, number, forward_backward=BATCH)
            step = await model.result(adapter_id, number + 1, clip_grad_and_step=operation_pb2.ClipGradAndStep())
            maximum = max(maximum, len(model.backend.engine.adapter_ids))
            return batch.forward.loss, step.step.grad_norm, step.step.step_count

        adapters = [await model.create(request_id=f'r{index}', **CONFIG) for index in range(ADAPTERS)]
        for number, trained in ((1, adapters), (3, adapters[::5])):
            outcomes = await asyncio.gather(*(train(adapter.adapter_id, number) for adapter in trained))
            assert len(outcomes) == len(trained)
            assert len(set(outcomes)) == 1
        assert maximum <= RESIDENT
        before = set(model.backend.engine.adapter_ids)
        request = adapter_service_pb2.ListAdaptersRequest(page_size=1000)
        listed = (await model.adapters.ListAdapters(request, metadata=as_tenant('alice'))).adapters
        assert {adapter.adapter_id for adapter in listed if not adapter.is_parked} == before
        assert [adapter.step_count for adapter in reversed(listed)] == [
            1 + (index % 5 == 0) for index in range(ADAPTERS)
        ]
        assert set(model.backend.engine.adapter_ids) == before
