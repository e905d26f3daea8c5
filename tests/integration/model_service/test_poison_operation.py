"""kill -9 of a model service whenever it repeats certain work: a replay, a save, or the restore of an adapter."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.checkpoint_service import serving
from fixtures.faulty_service import FaultyModel, Kill
from fixtures.model_service import draw_example, forward_backward, operation_of
from services.kit.caller import Caller
from services.kit.rpc.channel import open_channel
from services.kit.rpc.context import acting_for
from services.kit.rpc.status import error_from_call
from services.model.application.attempts import MAX_ATTEMPTS
from services.model.application.restore import MAX_RESTORES
from twinkle.api.model.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    operation_pb2,
    training_service_pb2,
    training_service_pb2_grpc,
)

pytestmark = pytest.mark.timeout(300)

POISON = 3
"""Number of the operation during which the process is killed, at first and in each replay."""
KILLS = {
    'replay': [
        # The fifth operation of the program below is computed and durable, but its outcome is not.
        Kill(failpoint='operation.answered', count=5),
        *[Kill(failpoint='restore.replaying', count=POISON)] * (MAX_ATTEMPTS - 1),
    ],
    'save': [Kill(failpoint='state_verb.done', count=1)] * MAX_ATTEMPTS,
    'restore': [
        Kill(failpoint='operation.answered', count=5),
        *[Kill(failpoint='restore.begun', count=1)] * MAX_RESTORES,
    ],
}


class _Client:
    """Client that repeats each request while the service is down."""

    def __init__(self, channel: grpc.aio.Channel, base_model: str) -> None:
        self._adapters = adapter_service_pb2_grpc.AdapterServiceStub(channel)
        self._training = training_service_pb2_grpc.TrainingServiceStub(channel)
        self._base_model = base_model

    async def create(self, name: str) -> str:
        request = adapter_service_pb2.CreateAdapterRequest(
            request_id=name, base_model=self._base_model, lora_config={'lora_rank': 4, 'lora_dropout': 0.1, 'seed': 3}
        )
        return (await self._retry(self._adapters.CreateAdapter, request)).adapter.adapter_id

    async def train(self, adapter_id: str, number: int, *, seed: int) -> float:
        """Run a batch and return its loss."""
        batch = forward_backward([draw_example(seed=seed), draw_example(9, seed=seed + 50)])
        return (await self._execute(adapter_id, number, forward_backward=batch)).forward.loss

    async def save(self, adapter_id: str, number: int) -> None:
        """Save a checkpoint."""
        await self._execute(adapter_id, number, save=operation_pb2.Save(name='mine'))

    async def step(self, adapter_id: str, number: int) -> tuple[int, float]:
        """Run a step; return the number of steps and the norm of the gradient."""
        step = operation_pb2.ClipGradAndStep(max_grad_norm=1.0)
        found = (await self._execute(adapter_id, number, clip_grad_and_step=step)).step
        return found.step_count, found.grad_norm

    async def _execute(self, adapter_id: str, number: int, **verb: Any) -> Any:
        request = training_service_pb2.ExecuteRequest(operation=operation_of(adapter_id, number, **verb))
        return (await self._retry(self._training.Execute, request)).result

    async def _retry(self, method: Any, request: Any) -> Any:
        while True:
            try:
                return await method(request)
            except grpc.aio.AioRpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
                    raise
                await asyncio.sleep(0)


async def _train_innocent(client: _Client, adapter_id: str, numbers: range) -> list[Any]:
    return [
        await (client.train(adapter_id, number, seed=number) if number % 2 else client.step(adapter_id, number))
        for number in numbers
    ]


async def _reason(call: Awaitable[Any]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return error_from_call(raised.value, service='model').reason


async def _check(client: _Client, work: str) -> None:
    culprit, innocent = await client.create('culprit'), await client.create('innocent')
    await client.train(culprit, 1, seed=1)
    await client.step(culprit, 2)
    found = await _train_innocent(client, innocent, range(1, 3))
    poison = client.save(culprit, POISON) if work == 'save' else client.train(culprit, POISON, seed=7)
    reason = await _reason(poison)
    found += await _train_innocent(client, innocent, range(3, 5))
    reference = await client.create('undisturbed')
    assert await _train_innocent(client, reference, range(1, 5)) == found
    if work == 'restore':
        assert reason == await _reason(client.train(culprit, 4, seed=9)) == 'ADAPTER_DAMAGED'
        return
    assert reason == 'OPERATION_CRASHED'
    resumed = [await client.train(culprit, 4, seed=9), await client.step(culprit, 5)]
    reference = await client.create('without the operation')
    await _train_innocent(client, reference, range(1, 3))
    assert resumed == [await client.train(reference, 3, seed=9), await client.step(reference, 4)]


@pytest.mark.slow
@pytest.mark.parametrize('work', KILLS)
async def test_work_that_is_killed_each_time_fails(tiny_llama_dir: Path, tmp_path: Path, work: str) -> None:
    """Work fails after the last allowed kill, another adapter continues bitwise, and so does its own without it.

    An adapter whose restore is killed each time is reported as damaged.
    """
    kills = KILLS[work]
    (tmp_path / 'model').mkdir()
    async with serving(tmp_path / 'checkpoint') as checkpoints:
        settings = {
            'base_model': tiny_llama_dir,
            'checkpoint_address': checkpoints.address,
            'thread_count': 1,
            'drain_seconds': 0,
        }
        service = FaultyModel(tmp_path / 'model', settings, kills)
        running = asyncio.create_task(service.run())
        channel = open_channel(service.address)
        try:
            with acting_for(Caller(tenant_id='alice', scopes=frozenset({'train'}))):
                await _check(_Client(channel, str(tiny_llama_dir)), work)
            assert service.deaths == kills
        finally:
            await channel.close()
            await service.stop()
            await running
