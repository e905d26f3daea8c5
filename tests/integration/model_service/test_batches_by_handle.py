"""Batches from the data service give bitwise the same training as inline batches, even after kills."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.checkpoint_service import serving
from fixtures.data_service import ENCODE, RunningData, chat, chats, credits_for, refusal_of, serving_data, set_template
from fixtures.data_service import start as stream_start
from fixtures.faulty_service import FaultyModel, Kill
from fixtures.model_service import operation_of, serving_model
from twinkle.api.data.v1 import dataset_pb2, loader_service_pb2
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
ALICE, BOB = (Caller(tenant_id=tenant, scopes=frozenset({'train', 'data'})) for tenant in ('alice', 'bob'))
KILLS = [
    Kill(failpoint='batch.fetched'),
    Kill(failpoint='operation.computed', count=2),
    Kill(failpoint='journal.commit.after', count=2),
    Kill(failpoint='operation.answered', count=3),
]
LORA = {'lora_rank': 4, 'lora_dropout': 0.1, 'seed': 3}


class Trainer:
    """A tenant's client of the model service."""

    def __init__(self, address: str, base_model: Path) -> None:
        """Connect; `close` closes the channel."""
        self._channel = open_channel(address)
        self.close = self._channel.close
        self._adapters = adapter_service_pb2_grpc.AdapterServiceStub(self._channel)
        self._training = training_service_pb2_grpc.TrainingServiceStub(self._channel)
        self._base_model = str(base_model)

    async def create(self, name: str) -> str:
        """Return the id of the adapter with the request id `name`; create the adapter if necessary."""
        request = adapter_service_pb2.CreateAdapterRequest(
            request_id=name, base_model=self._base_model, lora_config=LORA
        )
        return (await _retry(self._adapters.CreateAdapter, request)).adapter.adapter_id

    def execute(self, adapter_id: str, number: int, batch: operation_pb2.Batch) -> Any:
        """Call Execute with forward_backward."""
        verb = operation_pb2.ForwardBackward(batch=batch)
        return self._training.Execute(_request(adapter_id, number, forward_backward=verb))

    async def train(self, adapter_id: str, batches: list[operation_pb2.Batch]) -> list[Any]:
        """Train on each batch, with a step after each batch; return all results."""
        results: list[Any] = []
        for index, batch in enumerate(batches):
            verb = operation_pb2.ForwardBackward(batch=batch)
            result = await self._retry(_request(adapter_id, 2 * index + 1, forward_backward=verb))
            results.append((result.forward.loss, [logprobs.data for logprobs in result.forward.logprobs]))
            step = operation_pb2.ClipGradAndStep(max_grad_norm=1.0)
            result = await self._retry(_request(adapter_id, 2 * index + 2, clip_grad_and_step=step))
            results.append((result.step.step_count, result.step.grad_norm))
        return results

    async def _retry(self, request: training_service_pb2.ExecuteRequest) -> Any:
        return (await _retry(self._training.Execute, request)).result


def _request(adapter_id: str, number: int, **verb: Any) -> training_service_pb2.ExecuteRequest:
    return training_service_pb2.ExecuteRequest(operation=operation_of(adapter_id, number, **verb))


async def _retry(method: Any, request: Any) -> Any:
    """Return the response; retry while the service is down."""
    while True:
        try:
            return await method(request)
        except grpc.aio.AioRpcError as error:
            if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
                raise
            await asyncio.sleep(0)


@pytest.fixture
async def data(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[RunningData]:
    """A data service with the tiny model in its configuration."""
    (tmp_path / 'data').mkdir()
    async with serving_data(tmp_path / 'data', base_models=(str(tiny_llama_dir),)) as running:
        yield running


async def _open(data: RunningData, base_model: Path) -> tuple[str, list[dataset_pb2.Cursor | None], list[Any]]:
    """Open a shuffled loader of two epochs; return its id, the cursor before each batch, and the batches."""
    source = chats(*(chat('question', 'word ' * (count + 1)) for count in range(5)))
    dataset = await data.create(source, set_template(base_model), ENCODE)
    loader = await data.open(dataset.dataset_id, 2, shuffle_seed=1, epoch_count=2)
    items = [item async for item in data.stream(stream_start(loader.loader_id), credits_for(64))]
    return loader.loader_id, [None, *(item.cursor for item in items[:-2])], [item.batch for item in items[:-1]]


def _handles(loader_id: str, cursors: list[dataset_pb2.Cursor | None]) -> list[operation_pb2.Batch]:
    loaders = [operation_pb2.LoaderBatch(loader_id=loader_id, cursor=cursor) for cursor in cursors]
    return [operation_pb2.Batch(loader=loader) for loader in loaders]


async def _close(data: RunningData, loader_id: str) -> None:
    request = loader_service_pb2.CloseLoaderRequest(loader_id=loader_id)
    await data.loaders.CloseLoader(request, metadata=data.metadata)


@pytest.mark.slow
async def test_handles_train_like_inline_batches_across_kills(
    data: RunningData, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """Losses, log-probabilities and norms equal those of inline batches; a repeat needs no loader."""
    loader_id, cursors, batches = await _open(data, tiny_llama_dir)
    inline = [operation_pb2.Batch(features=batch) for batch in batches]
    (tmp_path / 'model').mkdir()
    async with serving(tmp_path / 'checkpoint') as checkpoints:
        settings = {
            'base_model': tiny_llama_dir,
            'checkpoint_address': checkpoints.address,
            'data_address': data.address,
            'thread_count': 1,
            'drain_seconds': 0,
        }
        service = FaultyModel(tmp_path / 'model', settings, KILLS)
        running = asyncio.create_task(service.run())
        trainer = Trainer(service.address, tiny_llama_dir)
        try:
            with acting_for(ALICE):
                killed = await trainer.create('killed')
                results = await trainer.train(killed, _handles(loader_id, cursors))
                assert service.deaths == KILLS
                await _close(data, loader_id)
                assert await trainer.train(killed, _handles(loader_id, cursors)) == results
                uninterrupted = await trainer.create('undisturbed')
                assert await trainer.train(uninterrupted, inline) == results
        finally:
            await trainer.close()
            await service.stop()
            await running


async def test_restart_replays_without_the_data_service(
    data: RunningData, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """A restarted service continues bitwise while the data service is down."""
    loader_id, cursors, batches = await _open(data, tiny_llama_dir)
    handles, inline = _handles(loader_id, cursors), [operation_pb2.Batch(features=batch) for batch in batches]
    with acting_for(ALICE):
        async with serving_model(tiny_llama_dir, tmp_path / 'model', data_address=data.address) as model:
            trainer = Trainer(model.address, tiny_llama_dir)
            adapter_id = await trainer.create('a')
            await trainer.train(adapter_id, handles[:3])
            await trainer.close()
        unreachable_address = f'unix:{tmp_path}/nobody'
        async with serving_model(tiny_llama_dir, tmp_path / 'model', data_address=unreachable_address) as model:
            trainer = Trainer(model.address, tiny_llama_dir)
            results = await trainer.train(adapter_id, [*handles[:3], *inline[3:]])
            reference = await trainer.create('twin')
            assert await trainer.train(reference, inline) == results
            refused = await refusal_of(trainer.execute(reference, 2 * len(inline) + 1, handles[0]))
            assert (refused.code, refused.reason) == ('UNAVAILABLE', 'SERVICE_UNREACHABLE')
            await trainer.close()


async def test_refusals_name_the_problem_of_the_handle(data: RunningData, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Another tenant's loader, a position after the end and a forged cursor give different errors."""
    loader_id, cursors, _ = await _open(data, tiny_llama_dir)
    end = dataset_pb2.Cursor(consumed_rows=10)
    forged = dataset_pb2.Cursor(consumed_rows=2, state=b'x')
    forged_handle, after_end = _handles(loader_id, [forged, end])
    async with serving_model(tiny_llama_dir, tmp_path / 'model', data_address=data.address) as model:
        trainer = Trainer(model.address, tiny_llama_dir)
        with acting_for(BOB):
            foreign = await refusal_of(trainer.execute(await trainer.create('b'), 1, _handles(loader_id, cursors)[0]))
        with acting_for(ALICE):
            adapter_id = await trainer.create('a')
            cursor = await refusal_of(trainer.execute(adapter_id, 1, forged_handle))
            end_failure = await refusal_of(trainer.execute(adapter_id, 1, after_end))
        await trainer.close()
    assert (foreign.code, foreign.reason) == ('NOT_FOUND', 'LOADER_NOT_FOUND')
    assert (cursor.code, cursor.field) == ('INVALID_ARGUMENT', 'batch.loader.cursor')
    assert (end_failure.code, end_failure.reason) == ('FAILED_PRECONDITION', 'LOADER_AT_END')
