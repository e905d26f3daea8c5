"""Tests of two model services with different base models behind one gateway, even if one is unreachable."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from blake3 import blake3

from fixtures.model_service import RunningModel, batch_of, operation_of, serving_model
from fixtures.running_gateway import ADMIN, RunningGateway, bearer, failure_of, running_gateway
from fixtures.tiny_model import build_tiny_model
from twinkle.api.gateway.v1 import catalogue_service_pb2, catalogue_service_pb2_grpc
from twinkle.api.model.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    operation_pb2,
    training_service_pb2,
    training_service_pb2_grpc,
)
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import InputFeature
from twinkle_client.transfer import checksum
from twinkle_services.model.domain.adapter import ExpiredAdapter

TOKENS = [3, 9, 4, 1, 5, 9, 2, 6]
FEATURE: InputFeature = {'input_ids': TOKENS, 'labels': TOKENS}


@dataclass
class Pair:
    """A gateway and its running model services by base model."""

    gateway: RunningGateway
    folders: tuple[Path, Path]
    models: dict[str, RunningModel] = field(default_factory=dict[str, RunningModel])
    stacks: dict[str, AsyncExitStack] = field(default_factory=dict[str, AsyncExitStack])
    metadata: Any = ADMIN

    @property
    def base_models(self) -> tuple[str, str]:
        """Names of the two base models."""
        return str(self.folders[0]), str(self.folders[1])

    @property
    def adapters(self) -> Any:
        """Stub of the adapter service at the gateway."""
        return adapter_service_pb2_grpc.AdapterServiceStub(self.gateway.channel)

    @property
    def training(self) -> Any:
        """Stub of the training service at the gateway."""
        return training_service_pb2_grpc.TrainingServiceStub(self.gateway.channel)

    async def create(self, base_model: str, request_id: str, **fields: Any) -> str:
        """Create an adapter and return its id."""
        request = adapter_service_pb2.CreateAdapterRequest(request_id=request_id, base_model=base_model, **fields)
        return (await self.adapters.CreateAdapter(request, metadata=self.metadata)).adapter.adapter_id

    def get(self, adapter_id: str, metadata: Any = None) -> Any:
        """Start a call of GetAdapter."""
        request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id)
        return self.adapters.GetAdapter(request, metadata=metadata or self.metadata)

    def train(self, adapter_id: str, number: int) -> Any:
        """Start an operation with a small batch."""
        request = training_service_pb2.ExecuteRequest(operation=_forward_backward(adapter_id, number))
        return self.training.Execute(request, metadata=self.metadata)

    async def list_ids(self, page_size: int) -> list[list[str]]:
        """Return the ids of all adapters, page by page."""
        pages, token = list[list[str]](), ''
        while True:
            request = adapter_service_pb2.ListAdaptersRequest(page_size=page_size, page_token=token)
            response = await self.adapters.ListAdapters(request, metadata=self.metadata)
            pages.append([item.adapter_id for item in response.adapters])
            token = response.next_page_token
            if not token:
                return pages

    async def active_runs(self) -> set[str]:
        """Return the ids of the active runs in the catalogue."""
        stub = catalogue_service_pb2_grpc.CatalogueServiceStub(self.gateway.channel)
        response = await stub.ListRuns(catalogue_service_pb2.ListRunsRequest(), metadata=self.metadata)
        return {run.run_id for run in response.runs if run.is_active}

    async def start(self, base_model: str, state_dir: Path, *, listen: str = '127.0.0.1:0') -> str:
        """Start a model service and return its address."""
        await asyncio.to_thread(state_dir.mkdir, exist_ok=True)
        stack = self.stacks[base_model] = AsyncExitStack()
        model = await stack.enter_async_context(serving_model(Path(base_model), state_dir, listen=listen))
        self.models[base_model] = model
        return model.address

    async def stop(self, base_model: str) -> str:
        """Stop a model service and return its previous address."""
        await self.stacks.pop(base_model).aclose()
        return self.models.pop(base_model).address


def _forward_backward(adapter_id: str, number: int, **batch: Any) -> operation_pb2.Operation:
    source = operation_pb2.Batch(**batch) if batch else batch_of([FEATURE])
    verb = operation_pb2.ForwardBackward(batch=source)
    return operation_of(adapter_id, number, forward_backward=verb)


@asynccontextmanager
async def _running_pair(folders: tuple[Path, Path], state: Path) -> AsyncIterator[Pair]:
    pair = Pair(None, folders)  # pyright: ignore[reportArgumentType] (set below)
    try:
        addresses = [await pair.start(name, state / f'model-{index}') for index, name in enumerate(pair.base_models)]
        await asyncio.to_thread((state / 'gateway').mkdir)
        async with running_gateway(
            state / 'gateway',
            models=addresses,
            checkpoint=pair.models[pair.base_models[0]].checkpoints.address,
            internal_token='',
            server_info_freshness=timedelta(),
        ) as pair.gateway:
            yield pair
    finally:
        for stack in pair.stacks.values():
            await stack.aclose()


@pytest.fixture(scope='session')
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two base models of different families."""
    root = tmp_path_factory.mktemp('bases')
    return build_tiny_model(root / 'tiny-llama'), build_tiny_model(root / 'tiny-qwen3', family='qwen3')


@pytest.fixture
async def pair(folders: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[Pair]:
    """A gateway in front of two model services."""
    async with _running_pair(folders, tmp_path) as running:
        yield running


async def test_adapters_of_both_base_models_train(pair: Pair) -> None:
    """Unary calls and streams reach the model service of their adapter."""
    ids = [await pair.create(name, f'r-{name}') for name in pair.base_models]
    for number in (1, 2):
        for adapter_id in ids:
            response = await pair.train(adapter_id, number)
            assert response.result.sequence_number == number
    for adapter_id, name in zip(ids, pair.base_models, strict=True):
        assert (await pair.get(adapter_id)).adapter.base_model == name
        requests = [training_service_pb2.TrainRequest(operation=_forward_backward(adapter_id, 3))]
        results = [item.result async for item in pair.training.Train(iter(requests), metadata=pair.metadata)]
        assert [(result.sequence_number, result.HasField('error')) for result in results] == [(3, False)]
        assert pair.models[name].backend.facts().base_models[0].base_model == name
    request = training_service_pb2.GetOperationRequest(adapter_id=ids[1], sequence_number=2)
    assert (await pair.training.GetOperation(request, metadata=pair.metadata)).state == 3


async def test_all_base_models_are_listed_and_unknown_ones_refused(pair: Pair) -> None:
    """Server information lists both services; the error for an unknown base model lists the known ones."""
    info = await server_service_pb2_grpc.ServerServiceStub(pair.gateway.channel).GetServerInfo(
        server_service_pb2.GetServerInfoRequest(), metadata=pair.metadata
    )
    parts = [part for part in info.services if part.service == 'model']
    assert [[model.base_model for model in part.base_models] for part in parts] == [[name] for name in pair.base_models]
    request = adapter_service_pb2.CreateAdapterRequest(request_id='r', base_model='another')
    failure = await failure_of(pair.adapters.CreateAdapter(request, metadata=pair.metadata))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, 'BASE_MODEL_NOT_FOUND')
    assert failure.metadata['known'].split(',') == sorted(pair.base_models)
    unnamed = adapter_service_pb2.CreateAdapterRequest(request_id='r')
    failure = await failure_of(pair.adapters.CreateAdapter(unnamed, metadata=pair.metadata))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_stream_of_two_base_models_is_refused_and_an_absent_adapter_is_reported(pair: Pair) -> None:
    """A stream serves only one base model; an operation on an absent adapter does not affect later operations."""
    ids = [await pair.create(name, f'r-{name}') for name in pair.base_models]

    def stream(*operations: tuple[str, int]) -> Any:
        requests = [training_service_pb2.TrainRequest(operation=_forward_backward(*item)) for item in operations]
        return pair.training.Train(iter(requests), metadata=pair.metadata)

    failure = await failure_of(stream((ids[1], 1), (ids[0], 1)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    results = [item.result async for item in stream(('absent', 1), (ids[0], 1))]
    assert [result.HasField('error') for result in results] == [True, False]


async def test_upload_reaches_the_service_of_its_adapter(pair: Pair) -> None:
    """An upload reaches its adapter's service; an upload without an adapter is refused."""
    adapter_id = await pair.create(pair.base_models[1], 'r1')
    data = batch_of([FEATURE]).features.SerializeToString()
    header = training_service_pb2.BatchHeader(
        upload_id='up-1', size_bytes=len(data), digest=blake3(data).hexdigest(), adapter_id=adapter_id
    )
    chunk = tensor_pb2.TensorChunk(data=data, checksum=checksum(data))

    def upload() -> Any:
        parts = [
            training_service_pb2.UploadBatchRequest(header=header),
            training_service_pb2.UploadBatchRequest(chunk=chunk),
        ]
        return pair.training.UploadBatch(iter(parts), metadata=pair.metadata)

    assert (await upload()).committed_bytes == len(data)
    operation = _forward_backward(adapter_id, 1, upload_id='up-1')
    request = training_service_pb2.ExecuteRequest(operation=operation)
    assert (await pair.training.Execute(request, metadata=pair.metadata)).result.sequence_number == 1
    header.ClearField('adapter_id')
    failure = await failure_of(upload())
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert 'header.adapter_id' in failure.message


async def test_list_contains_the_adapters_of_all_services_newest_first(pair: Pair) -> None:
    """Every adapter is on exactly one page for any page size, and a deleted adapter is on no page."""
    created = [await pair.create(pair.base_models[index % 2], f'r-{index}') for index in range(5)]
    for page_size in (1, 2, 3, 5, 50):
        pages = await pair.list_ids(page_size)
        assert [adapter_id for page in pages for adapter_id in page] == created[::-1]
        assert all(len(page) == page_size for page in pages[:-1])
    await pair.adapters.DeleteAdapter(
        adapter_service_pb2.DeleteAdapterRequest(adapter_id=created[1]), metadata=pair.metadata
    )
    assert await pair.list_ids(50) == [[created[4], created[3], created[2], created[0]]]
    request = adapter_service_pb2.ListAdaptersRequest(page_token='bWFkZSB1cA==')
    failure = await failure_of(pair.adapters.ListAdapters(request, metadata=pair.metadata))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_adapter_of_another_tenant_is_not_found(pair: Pair) -> None:
    """The errors for another tenant's adapter and an absent adapter are equal except for the id, at both services."""
    other = bearer((await pair.gateway.make_key('mallory')).secret)
    ids = [await pair.create(name, f'r-{name}') for name in pair.base_models]
    absent = await failure_of(pair.get('absent', other))
    for adapter_id in ids:
        foreign = await failure_of(pair.get(adapter_id, other))
        assert (foreign.code, foreign.reason) == (absent.code, absent.reason)
        assert foreign.message.replace(adapter_id, 'absent') == absent.message


async def test_expired_adapter_that_the_catalogue_does_not_list_is_reported_by_its_service(pair: Pair) -> None:
    """A call for an expired adapter without a run in the catalogue fails with ADAPTER_EXPIRED, from either service."""
    for base_model in pair.base_models:
        directory = pair.models[base_model].verbs.directory
        owned = directory.find(await pair.create(base_model, f'r-{base_model}'))
        assert owned is not None
        expired = ExpiredAdapter(adapter_id='ad-gone', tenant_id=owned.tenant_id, checkpoint_path='')
        directory.expire(expired)
        assert (await failure_of(pair.get('ad-gone'))).reason == 'ADAPTER_EXPIRED'
        directory.expire(replace(expired, tenant_id='another'))


async def test_service_continues_while_the_other_is_unreachable(pair: Pair, tmp_path: Path) -> None:
    """A stopped service's adapters are reported as unreachable, not as absent, and train again after its restart."""
    ids = [await pair.create(name, f'r-{name}') for name in pair.base_models]
    for adapter_id in ids:
        await pair.train(adapter_id, 1)
    while await pair.active_runs() != set(ids):
        pass
    address = await pair.stop(pair.base_models[1])
    for call in (pair.get(ids[1]), pair.train(ids[1], 2)):
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE')
    failure = await failure_of(
        pair.adapters.ListAdapters(adapter_service_pb2.ListAdaptersRequest(), metadata=pair.metadata)
    )
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE')
    assert failure.metadata == {'service': 'model', 'baseModels': pair.base_models[1]}
    assert (await pair.train(ids[0], 2)).result.sequence_number == 2
    new = await pair.create(pair.base_models[0], 'r-new')
    assert (await pair.get(new)).adapter.base_model == pair.base_models[0]
    await pair.start(pair.base_models[1], tmp_path / 'model-1', listen=address)
    assert await _train_once_reachable(pair, ids[1], 2) == 2
    while not {*ids, new} <= await pair.active_runs():
        pass


async def _train_once_reachable(pair: Pair, adapter_id: str, number: int) -> int:
    """Train as soon as the service is reachable; return the sequence number."""
    while True:
        try:
            return (await pair.train(adapter_id, number)).result.sequence_number
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise


@pytest.mark.slow
async def test_gateway_that_starts_without_one_service_serves_the_other(pair: Pair, tmp_path: Path) -> None:
    """Adapters of the running service are found; calls for other adapters fail with SERVICE_UNREACHABLE."""
    ids = [await pair.create(name, f'r-{name}') for name in pair.base_models]
    while await pair.active_runs() != set(ids):
        pass
    addresses = [pair.models[name].address for name in pair.base_models]
    await pair.stop(pair.base_models[1])
    async with running_gateway(
        tmp_path / 'gateway', models=addresses, internal_token='', server_info_freshness=timedelta()
    ) as gateway:
        restarted = Pair(gateway, pair.folders)
        assert (await restarted.get(ids[0])).adapter.adapter_id == ids[0]
        for call in (restarted.get(ids[1]), restarted.get('absent')):
            assert (await failure_of(call)).reason == 'SERVICE_UNREACHABLE'
        request = adapter_service_pb2.CreateAdapterRequest(request_id='r', base_model=pair.base_models[1])
        failure = await failure_of(restarted.adapters.CreateAdapter(request, metadata=restarted.metadata))
        assert failure.reason == 'SERVICE_UNREACHABLE'
