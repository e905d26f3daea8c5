"""The OpenAI API samples public checkpoints of other tenants by their paths."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.sampled import lora_weights
from fixtures.two_tenants import TwoTenants, two_tenants
from twinkle_services.sampler.domain.adapter import CheckpointFacts

CHAT = {'messages': [{'role': 'user', 'content': 'x'}]}


@pytest.fixture
async def deployment(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[TwoTenants]:
    """A gateway with two tenants."""
    async with two_tenants(tmp_path, tiny_llama_dir, base_model='tiny') as running:
        yield running


async def responses_to_bob(deployment: TwoTenants, model: str) -> list[tuple[int, Any]]:
    """Return status and body of each request of bob that names a model."""
    bob = deployment.secrets['bob']
    body = {'model': model, 'max_tokens': 1}
    responses = [
        await deployment.call('POST', '/v1/completions', bob, {**body, 'prompt': 'x'}),
        await deployment.call('POST', '/v1/chat/completions', bob, {**body, **CHAT}),
        await deployment.call('GET', f'/v1/models/{model}', bob),
    ]
    return [(response.status_code, response.json()) for response in responses]


async def test_public_checkpoint_of_another_tenant_can_be_sampled(deployment: TwoTenants) -> None:
    """Another tenant's checkpoint can be sampled while it is public; then its path fails like an unknown path."""
    run = deployment.alices.model
    native = f'twinkle://{run}/weights/best.sampler'
    # The sampler's source of weights is a fake, which does not call the checkpoint service.
    facts = CheckpointFacts(path=native, digest='d' * 64, step_count=7)
    deployment.source.checkpoints['bob', native] = (facts, lora_weights(0, adapter_id=run, base_model='tiny'))
    path, absent = f'tinker://{run}/sampler_weights/best', f'tinker://{run}/sampler_weights/worst'
    publish = f'/api/v1/training_runs/{run}/checkpoints/sampler_weights/best/publish'
    alice = deployment.secrets['alice']
    for method, is_public in (('POST', True), ('DELETE', False)):
        assert (await deployment.call(method, publish, alice)).status_code == 200
        for name in (path, f'tiny;{path}', native):
            found = await responses_to_bob(deployment, name)
            assert [status for status, _ in found] == [200 if is_public else 404] * 3, found
    for kept, unknown in zip(
        await responses_to_bob(deployment, path), await responses_to_bob(deployment, absent), strict=True
    ):
        errors = [body['error'] for _, body in (kept, unknown)]
        for error, name in zip(errors, (path, absent), strict=True):
            error.pop('request_id')
            error['message'] = error['message'].replace(name, '')
            assert error['metadata'].pop('baseModel') == name
        assert errors[0] == errors[1]
