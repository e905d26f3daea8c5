"""Three tenants use equal request ids and operation numbers, and their operations share passes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fixtures.model_service import RunningModel, batch_of, draw_example, forward_backward, serving_model
from twinkle.api.model.v1 import operation_pb2, training_config_pb2

CONFIG = training_config_pb2.TrainingConfig(
    loss=training_config_pb2.LossConfig(name='CrossEntropyLoss', reduction=training_config_pb2.LOSS_REDUCTION_MEAN)
)
LORA = training_config_pb2.LoraConfig(lora_rank=4, seed=3)
LENGTHS = {'alice': (30, 7), 'bob': (5,), 'carol': (12, 12, 40)}
"""Lengths of each tenant's examples. Each tenant has a different number of labels, the denominator of its mean."""


async def _train(model: RunningModel, tenant: str) -> tuple[list[Any], int]:
    """Train an adapter of a tenant, with the request id and operation numbers that all tenants use.

    Returns:
        Losses, token counts, gradient norms and the log-probabilities after each step, which depend on all weights;
        and the largest number of adapters that shared a pass.
    """
    adapter = await model.create(tenant=tenant, request_id='run', lora_config=LORA, training_config=CONFIG)
    found: list[Any] = []
    shared = 0
    for number in range(1, 10, 3):
        examples = [draw_example(length, seed=number + index) for index, length in enumerate(LENGTHS[tenant])]
        batch = forward_backward(examples)
        trained = await model.result(adapter.adapter_id, number, tenant=tenant, forward_backward=batch)
        step = operation_pb2.ClipGradAndStep(max_grad_norm=1.0)
        stepped = await model.result(adapter.adapter_id, number + 1, tenant=tenant, clip_grad_and_step=step)
        only = operation_pb2.ForwardOnly(batch=batch_of(examples))
        after = await model.result(adapter.adapter_id, number + 2, tenant=tenant, forward_only=only)
        logprobs = tuple(tensor.data for tensor in after.forward.logprobs)
        found.append((trained.forward.loss, trained.receipt.token_count, stepped.step.grad_norm, logprobs))
        shared = max(shared, trained.receipt.pass_adapter_count, after.receipt.pass_adapter_count)
    return found, shared


@pytest.mark.timeout(180)
async def test_means_of_tenants_have_their_own_denominators(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Each tenant's mean losses and gradient norms are bitwise the same as without the other tenants."""
    alone: dict[str, list[Any]] = {}
    for tenant in LENGTHS:
        async with serving_model(tiny_llama_dir, tmp_path / tenant) as model:
            alone[tenant], _ = await _train(model, tenant)
    shared = 1
    # Requests that arrive at different times run in different passes, so several runs may be necessary.
    for attempt in range(10):
        async with serving_model(tiny_llama_dir, tmp_path / f'shared{attempt}') as model:
            together = await asyncio.gather(*(_train(model, tenant) for tenant in LENGTHS))
        assert {tenant: found for tenant, (found, _) in zip(LENGTHS, together, strict=True)} == alone
        shared = max(shared, *(count for _, count in together))
        if shared > 1:
            break
    assert shared > 1
    assert len({str(numbers) for numbers in alone.values()}) == len(LENGTHS)
