"""The model service is killed while it parks an adapter."""

import asyncio
from typing import Any

import grpc
import pytest

from fixtures.checkpoint_service import as_tenant, serving
from fixtures.faulty_service import FaultyModel, Kill
from fixtures.model_service import draw_example, forward_backward, operation_of
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2
from twinkle.api.model.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    operation_pb2,
    training_service_pb2,
    training_service_pb2_grpc,
)
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for

pytestmark = pytest.mark.timeout(300)

KILLS = [Kill(failpoint='park.saved'), Kill(failpoint='page_out.recorded')]


async def _retry(method: Any, request: Any) -> Any:
    """Return the response; retry while the service is down."""
    while True:
        try:
            return await method(request)
        except grpc.aio.AioRpcError as error:
            if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
                raise
            await asyncio.sleep(0)


async def _create(adapters: Any, base_model: str, name: str) -> str:
    request = adapter_service_pb2.CreateAdapterRequest(
        request_id=name, base_model=base_model, lora_config={'lora_rank': 4, 'lora_dropout': 0.1, 'seed': 3}
    )
    return (await _retry(adapters.CreateAdapter, request)).adapter.adapter_id


async def _train(training: Any, adapter_id: str, numbers: range) -> list[Any]:
    results: list[Any] = []
    for number in numbers:
        verb = (
            {'forward_backward': forward_backward([draw_example(seed=number), draw_example(9, seed=number + 50)])}
            if number % 2
            else {'clip_grad_and_step': operation_pb2.ClipGradAndStep(max_grad_norm=1.0)}
        )
        request = training_service_pb2.ExecuteRequest(operation=operation_of(adapter_id, number, **verb))
        result = (await _retry(training.Execute, request)).result
        results.append(result.forward.loss if number % 2 else (result.step.step_count, result.step.grad_norm))
    return results


@pytest.mark.slow
async def test_kill_while_parking_saves_the_adapter_once(tiny_llama_dir, tmp_path):
    """An adapter is saved once and continues bitwise, although two kills interrupt its parking."""
    (tmp_path / 'model').mkdir()
    async with serving(tmp_path / 'checkpoint') as checkpoints:
        settings = {
            'base_model': tiny_llama_dir,
            'checkpoint_address': checkpoints.address,
            'thread_count': 1,
            'drain_seconds': 0,
        }
        service = FaultyModel(tmp_path / 'model', settings, KILLS)
        running = asyncio.create_task(service.run())
        channel = open_channel(service.address)
        try:
            adapters = adapter_service_pb2_grpc.AdapterServiceStub(channel)
            training = training_service_pb2_grpc.TrainingServiceStub(channel)
            with acting_for(Caller(tenant_id='alice', scopes=frozenset({'train'}))):
                adapter_id = await _create(adapters, str(tiny_llama_dir), 'parked')
                results = await _train(training, adapter_id, range(1, 4))
                request = adapter_service_pb2.ParkAdapterRequest(adapter_id=adapter_id, save_prefix='session-expired')
                parked = (await _retry(adapters.ParkAdapter, request)).adapter
                assert parked.is_parked
                assert service.deaths == KILLS
                results += await _train(training, adapter_id, range(4, 7))
                reference = await _create(adapters, str(tiny_llama_dir), 'undisturbed')
                assert await _train(training, reference, range(1, 7)) == results
            list_request = checkpoint_service_pb2.ListCheckpointsRequest(adapter_id=adapter_id)
            listed = await checkpoints.checkpoints.ListCheckpoints(list_request, metadata=as_tenant('alice'))
            assert [item.path for item in listed.checkpoints] == [parked.checkpoint_path]
        finally:
            await channel.close()
            await service.stop()
            await running
