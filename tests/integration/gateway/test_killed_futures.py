"""Tests that futures finish and operations run once although the gateway is killed at any stage of a future."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fixtures.future_driver import FutureDriver, GatewayExited, driven_gateway
from fixtures.model_service import draw_example, forward_backward, operation_of, serving_model
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, operation_result_pb2, training_config_pb2
from twinkle.api.model.v1 import training_service_pb2 as wire
from twinkle_services.gateway.futures.rules import FutureRequest
from twinkle_services.kit.failpoints import FUTURE_FAILPOINTS

pytestmark = pytest.mark.timeout(300)

STEPS = 8


def requests_of(lane: str, base_model: str) -> list[FutureRequest]:
    """Return a client's requests: create an adapter, train some steps, and publish the weights."""
    creation = adapter_service_pb2.CreateAdapterRequest(
        base_model=base_model, adapter_id=lane, lora_config=training_config_pb2.LoraConfig(lora_rank=4, seed=3)
    )
    verbs: list[dict[str, Any]] = []
    for step in range(STEPS):
        verbs.append({'forward_backward': forward_backward([draw_example(seed=step), draw_example(seed=9 + step)])})
        verbs.append({'clip_grad_and_step': operation_pb2.ClipGradAndStep(max_grad_norm=1.0)})
    verbs.append({'publish_version': operation_pb2.PublishVersion()})
    requests = [wire.ExecuteRequest(operation=operation_of(lane, 0, **verb)) for verb in verbs]
    payloads = [creation.SerializeToString(deterministic=True)]
    payloads += [request.SerializeToString(deterministic=True) for request in requests]
    return [
        FutureRequest(
            kind='execute' if position else 'create_adapter',
            key=f'{lane}:{position}',
            payload=payload,
            session_id='',
            lane=lane,
            position=position,
        )
        for position, payload in enumerate(payloads)
    ]


async def train(driver: FutureDriver, requests: Sequence[FutureRequest], *, seed: int) -> list[bytes]:
    """Submit requests concurrently in random order, and return the results in the order of the positions."""
    shuffled = random.Random(seed).sample(requests, len(requests))
    await asyncio.gather(*(driver.submit(request) for request in shuffled), return_exceptions=True)
    # A client without an acknowledgement repeats its requests; a repeated request returns the same future.
    ids = await asyncio.gather(*(driver.submit(request) for request in requests))
    return await asyncio.gather(*map(driver.result, ids))


def comparable_results(results: Sequence[bytes]) -> list[Any]:
    """Return the values that must be equal in two runs: numbers, losses, norms and the digest of the weights."""
    responses = [wire.ExecuteResponse.FromString(result).result for result in results[1:]]
    return [(response.sequence_number, _outcome(response)) for response in responses]


def _outcome(response: operation_result_pb2.OperationResult) -> Any:
    match response.WhichOneof('outcome'):
        case 'forward':
            return response.forward.loss
        case 'step':
            return response.step.step_count, response.step.grad_norm
        case _:
            return response.publish.version, response.publish.digest


@pytest.mark.slow
async def test_gateway_killed_at_any_failpoint_applies_each_operation_once(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """Gateways that are killed at different failpoints give bitwise the same results as a run without kills."""
    async with serving_model(tiny_llama_dir, tmp_path / 'model') as service:
        settings = {'state_dir': tmp_path / 'undisturbed', 'upstreams.model': service.address}
        async with driven_gateway(settings) as driver:
            expected = comparable_results(await train(driver, requests_of('undisturbed', service.base_model), seed=0))
        assert [number for number, _ in expected] == list(range(1, 2 * STEPS + 2))
        settings['state_dir'] = tmp_path / 'killed'
        requests = requests_of('killed', service.base_model)
        for seed, failpoint in enumerate(FUTURE_FAILPOINTS):
            # The failpoint triggers the second time, when one future is finished and others are in the queue.
            async with driven_gateway(settings, failpoints=f'{failpoint}=2') as driver:
                with pytest.raises(GatewayExited):
                    await train(driver, requests, seed=seed)
        async with driven_gateway(settings) as driver:
            assert comparable_results(await train(driver, requests, seed=len(FUTURE_FAILPOINTS))) == expected
