"""Tests that batches by handle are metered like inline batches, with far fewer bytes through the gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from fixtures.byte_proxy import ByteProxy
from fixtures.data_service import ENCODE, RunningData, chat, chats, serving_data, set_template
from fixtures.model_service import operation_of, serving_model
from fixtures.running_gateway import RunningGateway, bearer, running_gateway
from twinkle.api.data.v1 import dataset_pb2, input_feature_pb2, loader_service_pb2, loader_service_pb2_grpc
from twinkle.api.gateway.v1 import catalogue_service_pb2, catalogue_service_pb2_grpc
from twinkle.api.model.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    operation_pb2,
    training_service_pb2,
    training_service_pb2_grpc,
)


class Program:
    """A client program of a tenant."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        self._channel, self._metadata = channel, bearer(secret)

    async def create_adapter(self, base_model: str) -> str:
        """Create an adapter and return its id."""
        stub = adapter_service_pb2_grpc.AdapterServiceStub(self._channel)
        request = adapter_service_pb2.CreateAdapterRequest(request_id='r', base_model=base_model)
        return (await stub.CreateAdapter(request, metadata=self._metadata)).adapter.adapter_id

    async def read_batch(self, loader_id: str) -> input_feature_pb2.FeatureBatch:
        """Return the first batch of a loader."""
        stub = loader_service_pb2_grpc.LoaderServiceStub(self._channel)
        call = stub.StreamBatches(metadata=self._metadata)
        await call.write(loader_service_pb2.StreamBatchesRequest(start={'loader_id': loader_id}))
        await call.write(loader_service_pb2.StreamBatchesRequest(credits=1))
        response = await call.read()
        call.cancel()
        return response.batch

    async def train(self, adapter_id: str, number: int, batch: operation_pb2.Batch) -> Any:
        """Return the result of `forward_backward`, without log-probabilities."""
        options = operation_pb2.ForwardOptions(is_logprobs_returned=False)
        verb = operation_pb2.ForwardBackward(batch=batch, options=options)
        request = training_service_pb2.ExecuteRequest(operation=operation_of(adapter_id, number, forward_backward=verb))
        stub = training_service_pb2_grpc.TrainingServiceStub(self._channel)
        return (await stub.Execute(request, metadata=self._metadata)).result

    async def wait_for_trained_tokens(self, token_count: int) -> int:
        """Return the metered tokens once there are at least `token_count`; the timeout of the test limits the wait."""
        stub = catalogue_service_pb2_grpc.CatalogueServiceStub(self._channel)
        trained_tokens = 0
        while trained_tokens < token_count:
            response = await stub.GetUsage(catalogue_service_pb2.GetUsageRequest(), metadata=self._metadata)
            trained_tokens = sum(item.trained_token_count for item in response.usages)
        return trained_tokens


@asynccontextmanager
async def counted_channel(gateway: RunningGateway, *, is_response: bool) -> AsyncIterator[tuple[ByteProxy, Any]]:
    """Yield a byte-counting proxy in front of the gateway, and a channel through it."""
    proxy = ByteProxy(int(gateway.address.rsplit(':', 1)[1]), is_counting_responses=is_response)
    try:
        async with grpc.aio.insecure_channel(await proxy.start()) as channel:
            yield proxy, channel
    finally:
        await proxy.stop()


async def _create_loader(data: RunningData, base_model: Path) -> str:
    dataset = await data.create(
        chats(*(chat('question', 'word ' * 300) for _ in range(8))),
        set_template(base_model, max_length=480, truncation_strategy=dataset_pb2.TRUNCATION_STRATEGY_RIGHT),
        ENCODE,
    )
    return (await data.open(dataset.dataset_id, 8)).loader_id


async def test_handle_is_metered_like_its_batch_and_needs_few_bytes(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A handle is charged the same tokens as its batch, and needs less than 1/50 of the bytes in each direction."""
    for name in ('data', 'model', 'gateway'):
        (tmp_path / name).mkdir()
    async with (
        serving_data(tmp_path / 'data', base_models=(str(tiny_llama_dir),)) as data,
        serving_model(tiny_llama_dir, tmp_path / 'model', data_address=data.address) as model,
        running_gateway(
            tmp_path / 'gateway',
            upstream=model.address,
            checkpoint=model.checkpoints.address,
            data=data.address,
            internal_token='',
        ) as gateway,
    ):
        loader_id = await _create_loader(data, tiny_llama_dir)
        secret = (await gateway.make_key('alice')).secret
        handle = operation_pb2.Batch(loader={'loader_id': loader_id})
        byte_counts: dict[bool, tuple[int, int]] = {}
        for index, is_response in enumerate((False, True)):
            async with counted_channel(gateway, is_response=is_response) as (proxy, channel):
                program = Program(channel, secret)
                adapter_id = await program.create_adapter(model.base_model)
                begin = proxy.passed_bytes
                inline = operation_pb2.Batch(features=await program.read_batch(loader_id))
                expected = await program.train(adapter_id, 2 * index + 1, inline)
                middle = proxy.passed_bytes
                result = await program.train(adapter_id, 2 * index + 2, handle)
                byte_counts[is_response] = middle - begin, proxy.passed_bytes - middle
                assert (result.forward.loss, result.next_cursor.consumed_rows) == (expected.forward.loss, 8)
                tokens = result.receipt.token_count
                assert tokens == expected.receipt.token_count
                assert await program.wait_for_trained_tokens(tokens * (2 * index + 2)) == tokens * (2 * index + 2)
    for inline_bytes, handle_bytes in byte_counts.values():
        assert handle_bytes * 50 < inline_bytes
