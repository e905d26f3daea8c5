"""Tests of a client of two gateway processes on one PostgreSQL database while one gateway is killed."""

import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fixtures.checkpoint_service import as_tenant
from fixtures.gateway_pair import Pair, killable_gateway
from fixtures.model_service import serving_model
from twinkle.api.model.v1 import adapter_service_pb2

pytestmark = pytest.mark.timeout(500)

STEPS = 6
"""Number of training steps of a client."""
FAILPOINTS = ('future.row', 'future.numbered', 'future.executed')
"""Failpoints of the killed gateway: before it acknowledges a future, and before and after an operation runs."""


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return a client's requests for one model: training steps and a final forward pass."""
    adam = {'adam_params': {'learning_rate': 0.02, 'beta1': 0.9, 'beta2': 0.95, 'eps': 1e-12}}
    requests: list[tuple[str, dict[str, Any]]] = []
    for step in range(STEPS):
        requests += [('forward_backward', {'forward_backward_input': _batch(step)}), ('optim_step', adam)]
    return [*requests, ('forward', {'forward_input': _batch(0)})]


def _batch(step: int) -> dict[str, Any]:
    tokens = [3 + step, 9, 4, 1, 5, 9, 2]
    targets = {'data': [9, 4, 1, 5, 9, 2, 6], 'dtype': 'int64', 'shape': [7]}
    weights = {'data': [1.0] * 7, 'dtype': 'float32', 'shape': [7]}
    chunk = {'type': 'encoded_text', 'tokens': tokens}
    datum = {'model_input': {'chunks': [chunk]}, 'loss_fn_inputs': {'target_tokens': targets, 'weights': weights}}
    return {'data': [datum], 'loss_fn': 'cross_entropy'}


def numbers_of(outcomes: list[dict[str, Any]]) -> list[Any]:
    """Return the metrics and outputs of every operation, which must be bitwise equal in two runs."""
    assert all('error' not in outcome for outcome in outcomes), outcomes
    return [(outcome.get('metrics'), outcome.get('loss_fn_outputs')) for outcome in outcomes]


@pytest.mark.slow
async def test_client_of_two_gateways_is_served_after_one_is_killed(
    tiny_llama_dir: Path, tmp_path: Path, postgres_database: str
) -> None:
    """Every operation of a client runs once even if one gateway is killed, with bitwise equal results."""
    for name in ('model', 'surviving', 'killed'):
        (tmp_path / name).mkdir()
    async with serving_model(tiny_llama_dir, tmp_path / 'model') as model:
        settings = {
            'upstreams.model': model.address,
            'upstreams.checkpoint': model.checkpoints.address,
            'database_url': postgres_database,
            'key_pepper': '5e' * 16,
            'futures.payload_dir': tmp_path / 'payloads',
            'futures.lease': 'PT5S',
        }

        async def counts_of(model_id: str) -> tuple[int, int]:
            request = adapter_service_pb2.GetAdapterRequest(adapter_id=model_id)
            adapter = (await model.adapters.GetAdapter(request, metadata=as_tenant('default'))).adapter
            return adapter.step_count, adapter.sequence_number

        async with killable_gateway(tmp_path / 'surviving', settings) as (_, surviving):
            _, outcomes = await Pair([surviving], Random(0)).train(model.base_model, bodies())
            expected = numbers_of(outcomes)
            for seed, failpoint in enumerate(FAILPOINTS):
                killed = killable_gateway(tmp_path / 'killed', settings, failpoints=f'{failpoint}=2')
                async with killed as (process, client):
                    pair = Pair([surviving, client], Random(seed))
                    model_id, outcomes = await pair.train(model.base_model, bodies())
                    assert numbers_of(outcomes) == expected
                    assert await counts_of(model_id) == (STEPS, 2 * STEPS + 1)
                    assert await process.wait() == -signal.SIGKILL
