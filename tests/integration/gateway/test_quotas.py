"""Tests of quotas and usage in the gRPC and Tinker APIs, with real model and checkpoint services."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from fixtures.model_service import RunningModel, operation_of, serving_model
from fixtures.running_gateway import ADMIN, ADMIN_KEY, Failure, RunningGateway, bearer, failure_of, running_gateway
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, checkpoint_service_pb2_grpc
from twinkle.api.data.v1 import input_feature_pb2
from twinkle.api.gateway.v1 import catalogue_service_pb2, catalogue_service_pb2_grpc, quota_service_pb2_grpc
from twinkle.api.gateway.v1 import quota_service_pb2 as wire
from twinkle.api.model.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    operation_pb2,
    training_service_pb2,
    training_service_pb2_grpc,
)
from twinkle_services.kit.rpc.tensors import tensor_to_proto

LENGTH = 7
"""Number of tokens of the training batch."""
INPUTS = {
    'target_tokens': {'data': [1, 1, 1], 'dtype': 'int64', 'shape': [3]},
    'weights': {'data': [1, 1, 1], 'dtype': 'float32', 'shape': [3]},
}
FORWARD = {
    'data': [
        {'model_input': {'chunks': [{'type': 'encoded_text', 'tokens': [1, 2, 3]}]}, 'loss_fn_inputs': INPUTS},
    ],
    'loss_fn': 'cross_entropy',
}


@dataclass
class Deployment:
    """A gateway with a model service, and the key of a tenant."""

    gateway: RunningGateway
    model: RunningModel
    http: httpx.AsyncClient
    secret: str
    run: str = ''
    """Id of the first adapter; empty until it is created."""

    @property
    def metadata(self) -> Any:
        """Metadata of the tenant's calls."""
        return bearer(self.secret)

    @property
    def quotas(self) -> Any:
        """Stub of the quota service for administrators."""
        return quota_service_pb2_grpc.QuotaServiceStub(self.gateway.channel)

    @property
    def training(self) -> Any:
        """Stub of the training service at the gateway."""
        return training_service_pb2_grpc.TrainingServiceStub(self.gateway.channel)

    async def allow(self, **limits: Any) -> None:
        """Set the quota of the tenant."""
        await self.quotas.SetQuota(wire.SetQuotaRequest(tenant_id='alice', quota=wire.Quota(**limits)), metadata=ADMIN)

    async def create(self, request_id: str) -> str:
        """Create an adapter and return its id."""
        stub = adapter_service_pb2_grpc.AdapterServiceStub(self.gateway.channel)
        request = adapter_service_pb2.CreateAdapterRequest(request_id=request_id, base_model=self.model.base_model)
        created = (await stub.CreateAdapter(request, metadata=self.metadata)).adapter.adapter_id
        self.run = self.run or created
        return created

    def execute(self, number: int, **verb: Any) -> Awaitable[Any]:
        """Start an operation on the first adapter."""
        request = training_service_pb2.ExecuteRequest(operation=operation_of(self.run, number, **verb))
        return self.training.Execute(request, metadata=self.metadata)

    async def usage(self) -> dict[str, catalogue_service_pb2.Usage]:
        """Return the usage of the tenant by run."""
        stub = catalogue_service_pb2_grpc.CatalogueServiceStub(self.gateway.channel)
        response = await stub.GetUsage(catalogue_service_pb2.GetUsageRequest(), metadata=self.metadata)
        return {item.run_id: item for item in response.usages}

    async def wait_for_usage(
        self, condition: Callable[[catalogue_service_pb2.Usage], bool]
    ) -> catalogue_service_pb2.Usage:
        """Return the usage of the first adapter's run once a condition holds; the test's timeout limits the wait."""
        while not condition(found := (await self.usage()).get(self.run, catalogue_service_pb2.Usage())):
            pass
        return found

    async def post(self, path: str, **body: Any) -> Any:
        """Call a route of the Tinker API and return its response."""
        response = await self.http.post(f'/api/v1/{path}', json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture
async def deployment(tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Deployment]:
    """A deployment with a key of the tenant alice."""
    (tmp_path / 'model').mkdir()
    (tmp_path / 'gateway').mkdir()
    async with (
        serving_model(tiny_llama_dir, tmp_path / 'model') as model,
        running_gateway(
            tmp_path / 'gateway',
            upstream=model.address,
            checkpoint=model.checkpoints.address,
            http_listen='127.0.0.1:0',
            internal_token='',
        ) as gateway,
    ):
        secret = (await gateway.make_key('alice')).secret
        async with httpx.AsyncClient(
            base_url=f'http://{gateway.http_address}', headers={'x-api-key': secret}, timeout=60
        ) as http:
            yield Deployment(gateway, model, http, secret)


def batch() -> operation_pb2.Batch:
    """Return one example of `LENGTH` tokens."""
    tokens = tensor_to_proto(np.arange(1, LENGTH + 1, dtype=np.int32))
    labels = tensor_to_proto(np.arange(1, LENGTH + 1, dtype=np.int64))
    feature = input_feature_pb2.InputFeature(input_ids=tokens, labels=labels)
    return operation_pb2.Batch(features=input_feature_pb2.FeatureBatch(features=[feature]))


def forward_backward() -> operation_pb2.ForwardBackward:
    """Return a `forward_backward` verb for the batch."""
    return operation_pb2.ForwardBackward(batch=batch())


async def test_training_is_metered_once_in_both_apis(deployment: Deployment) -> None:
    """The tokens and operations of each run are counted once; stored bytes equal the checkpoints' sizes."""
    await deployment.create('r1')
    for _ in range(2):
        await deployment.execute(1, forward_backward=forward_backward())
    await deployment.execute(2, step=operation_pb2.Step())
    saved = await deployment.execute(3, save=operation_pb2.Save(name='one'))
    used = await deployment.wait_for_usage(lambda item: item.operation_count == 3 and item.stored_bytes > 0)
    assert (used.trained_token_count, used.stored_bytes) == (LENGTH, saved.result.save.size_bytes)
    assert (used.sampled_token_count, used.prompt_count) == (0, 0)

    session = (await deployment.post('create_session', sdk_version='0.38.0'))['session_id']
    created = await deployment.post(
        'create_model',
        session_id=session,
        model_seq_id=0,
        base_model=deployment.model.base_model,
        lora_config={'rank': 4},
    )
    run = (await deployment.post('retrieve_future', request_id=created['request_id']))['model_id']
    for _ in range(2):
        done = await deployment.post('forward', model_id=run, seq_id=1, forward_input=FORWARD)
        await deployment.post('retrieve_future', request_id=done['request_id'])
    deployment.run = run
    assert (await deployment.wait_for_usage(lambda item: item.operation_count > 0)).trained_token_count == 3


async def test_adapter_beyond_the_quota_is_refused_in_both_apis(deployment: Deployment) -> None:
    """A refused creation creates nothing, a repeated creation succeeds, and a deletion allows a new adapter."""
    await deployment.allow(max_adapters=1)
    await deployment.create('r1')
    failure = await failure_of(deployment.create('r2'))
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUOTA_EXCEEDED')
    assert failure.metadata == {'quota': 'max_adapters', 'limit': '1'}
    assert failure.retry_seconds is None
    assert await deployment.create('r1') == deployment.run

    session = (await deployment.post('create_session', sdk_version='0.38.0'))['session_id']
    fields = {'base_model': deployment.model.base_model, 'lora_config': {'rank': 4}}
    created = await deployment.post('create_model', session_id=session, model_seq_id=0, **fields)
    refused = await deployment.post('retrieve_future', request_id=created['request_id'])
    assert (refused['category'], 'max_adapters' in refused['error']) == ('user', True)

    stub = adapter_service_pb2_grpc.AdapterServiceStub(deployment.gateway.channel)
    listed = await stub.ListAdapters(adapter_service_pb2.ListAdaptersRequest(), metadata=deployment.metadata)
    assert [adapter.adapter_id for adapter in listed.adapters] == [deployment.run]
    await stub.DeleteAdapter(
        adapter_service_pb2.DeleteAdapterRequest(adapter_id=deployment.run), metadata=deployment.metadata
    )
    await deployment.create('r3')


async def test_repeated_creation_at_another_gateway_returns_its_adapter(deployment: Deployment, tmp_path: Path) -> None:
    """A repeated creation succeeds at another gateway, even if the tenant has reached its adapter limit."""
    created = await deployment.create('r1')
    (tmp_path / 'other').mkdir()
    async with running_gateway(
        tmp_path / 'other',
        upstream=deployment.model.address,
        checkpoint=deployment.model.checkpoints.address,
        internal_token='',
    ) as gateway:
        other = Deployment(gateway, deployment.model, deployment.http, (await gateway.make_key('alice')).secret)
        await other.allow(max_adapters=1)
        assert await other.create('r1') == created
        failure = await failure_of(other.create('r2'))
        assert (failure.reason, failure.metadata) == ('QUOTA_EXCEEDED', {'quota': 'max_adapters', 'limit': '1'})


async def test_saves_beyond_the_storage_quota_are_refused(deployment: Deployment) -> None:
    """Saves, copies and uploads beyond the storage quota are refused; the save does not consume its sequence number."""
    await deployment.create('r1')
    await deployment.allow(stored_bytes=1)
    first = await deployment.execute(1, save=operation_pb2.Save(name='one'))
    await deployment.wait_for_usage(lambda item: item.stored_bytes > 0)
    failure = await failure_of(deployment.execute(2, save=operation_pb2.Save(name='two')))
    assert (failure.reason, failure.metadata) == ('QUOTA_EXCEEDED', {'quota': 'stored_bytes', 'limit': '1'})
    repeated = await deployment.execute(1, save=operation_pb2.Save(name='one'))
    assert (repeated.result.is_replayed, repeated.result.save) == (True, first.result.save)

    stream = deployment.training.Train(metadata=deployment.metadata)
    for operation in (
        operation_of(deployment.run, 2, save=operation_pb2.Save(name='two')),
        operation_of(deployment.run, 2, forward_backward=forward_backward()),
    ):
        await stream.write(training_service_pb2.TrainRequest(operation=operation))
        result = (await stream.read()).result
        assert result.HasField('error') == operation.HasField('save')
    await stream.done_writing()
    copied = await deployment.http.post(
        '/api/v1/copy_weights', json={'source_path': f'tinker://{deployment.run}/weights/one'}
    )
    assert (copied.status_code, copied.json()['reason']) == (400, 'QUOTA_EXCEEDED')
    header = checkpoint_service_pb2.CheckpointUploadHeader(
        upload_id='u', name='n', base_model=deployment.model.base_model, size_bytes=1
    )
    uploads = checkpoint_service_pb2_grpc.CheckpointServiceStub(deployment.gateway.channel)
    request = checkpoint_service_pb2.UploadCheckpointRequest(header=header)
    failure = await failure_of(uploads.UploadCheckpoint(iter([request]), metadata=deployment.metadata))
    assert failure.reason == 'QUOTA_EXCEEDED'
    assert set(await deployment.usage()) == {deployment.run}
    await deployment.allow()
    await deployment.execute(3, save=operation_pb2.Save(name='two'))


async def test_operations_of_a_tenant_without_tokens_wait(deployment: Deployment) -> None:
    """A call that would wait too long fails with a retry time; a stream waits until tokens are available."""
    await deployment.create('r1')
    await deployment.allow(tokens_per_second=1, burst_tokens=1)
    await deployment.execute(1, forward_backward=forward_backward())
    await deployment.wait_for_usage(lambda item: item.trained_token_count == LENGTH)
    failure = await failure_of(deployment.execute(2, forward_backward=forward_backward()))
    assert (failure.reason, failure.metadata['quota']) == ('QUOTA_EXCEEDED', 'tokens_per_second')
    assert failure.retry_seconds == pytest.approx(LENGTH - 1)

    stream = deployment.training.Train(metadata=deployment.metadata)
    operation = operation_of(deployment.run, 2, forward_backward=forward_backward())
    await stream.write(training_service_pb2.TrainRequest(operation=operation))
    read_task = asyncio.ensure_future(stream.read())
    await asyncio.wait({read_task}, timeout=0.05)
    assert not read_task.done()
    deployment.gateway.clock.advance(timedelta(seconds=LENGTH))
    assert (await read_task).result.sequence_number == 2
    await stream.done_writing()


async def test_futures_of_a_tenant_without_tokens_wait(deployment: Deployment) -> None:
    """A future of a tenant without tokens is accepted, and runs once tokens are available."""
    session = (await deployment.post('create_session', sdk_version='0.38.0'))['session_id']
    fields = {'base_model': deployment.model.base_model, 'lora_config': {'rank': 4}}
    created = await deployment.post('create_model', session_id=session, model_seq_id=0, **fields)
    run = (await deployment.post('retrieve_future', request_id=created['request_id']))['model_id']
    await deployment.allow(tokens_per_second=1, burst_tokens=1)
    first = await deployment.post('forward', model_id=run, seq_id=1, forward_input=FORWARD)
    await deployment.post('retrieve_future', request_id=first['request_id'])
    deployment.run = run
    await deployment.wait_for_usage(lambda item: item.trained_token_count == 3)
    second = await deployment.post('forward', model_id=run, seq_id=2, forward_input=FORWARD)
    waiting = asyncio.ensure_future(deployment.post('retrieve_future', request_id=second['request_id']))
    await asyncio.wait({waiting}, timeout=0.05)
    assert not waiting.done()
    deployment.gateway.clock.advance(timedelta(seconds=2))
    assert 'error' not in await waiting


async def test_quotas_need_the_admin_scope(deployment: Deployment) -> None:
    """A key without the scope `admin` gets the same error for existing and absent tenants."""
    plain = bearer((await deployment.gateway.make_key('alice', scopes=(1, 2, 3, 4))).secret)
    calls = [
        (deployment.quotas.GetQuota, wire.GetQuotaRequest),
        (deployment.quotas.SetQuota, wire.SetQuotaRequest),
        (deployment.quotas.GetTenantUsage, wire.GetTenantUsageRequest),
    ]
    for call, request in calls:
        outcomes: set[tuple[Any, ...]] = set()
        for tenant_id in ('alice', 'default', 'absent'):
            failure = await failure_of(call(request(tenant_id=tenant_id), metadata=plain))
            outcomes.add((failure.code, failure.reason, failure.message))
        assert [outcome[1] for outcome in outcomes] == ['SCOPE_MISSING']
        absent = await failure_of(call(request(tenant_id='absent'), metadata=ADMIN))
        assert (absent.code, absent.reason) == (grpc.StatusCode.NOT_FOUND, 'TENANT_NOT_FOUND')


async def test_quota_is_shown_as_set_and_as_effective(deployment: Deployment) -> None:
    """Limits that are not set have their defaults in the effective quota; invalid limits change nothing."""
    await deployment.allow(max_adapters=0, weight=2.5)
    shown = await deployment.quotas.GetQuota(wire.GetQuotaRequest(tenant_id='alice'), metadata=ADMIN)
    assert shown.quota == wire.Quota(max_adapters=0, weight=2.5)
    assert shown.effective_quota == shown.quota
    other = await deployment.quotas.GetQuota(wire.GetQuotaRequest(tenant_id='default'), metadata=ADMIN)
    assert (other.quota, other.effective_quota) == (wire.Quota(), wire.Quota(weight=1.0))
    for field, value in [
        ('max_adapters', -1),
        ('tokens_per_second', 0),
        ('burst_tokens', 0),
        ('concurrent_samples', -1),
        ('stored_bytes', -1),
        ('metric_points', -1),
        ('weight', 0.0),
        ('weight', float('nan')),
        ('weight', 1e9),
    ]:
        request = wire.SetQuotaRequest(tenant_id='alice', quota=wire.Quota(**{field: value}))
        failure: Failure = await failure_of(deployment.quotas.SetQuota(request, metadata=ADMIN))
        assert (failure.reason, failure.metadata['field']) == ('INVALID_FIELD', f'quota.{field}')
    assert (await deployment.quotas.GetQuota(wire.GetQuotaRequest(tenant_id='alice'), metadata=ADMIN)) == shown


async def test_usage_can_be_limited_to_a_time_range(deployment: Deployment) -> None:
    """Usage outside the range is not counted; an inverted range or an invalid time is refused."""
    await deployment.create('r1')
    await deployment.execute(1, forward_backward=forward_backward())
    await deployment.wait_for_usage(lambda item: item.trained_token_count == LENGTH)
    now = deployment.gateway.clock.now()

    async def tokens_between(**seconds: int) -> list[int]:
        request = wire.GetTenantUsageRequest(tenant_id='alice')
        for name, offset in seconds.items():
            getattr(request, name).FromDatetime(now + timedelta(seconds=offset))
        response = await deployment.quotas.GetTenantUsage(request, metadata=ADMIN)
        return [item.trained_token_count for item in response.usages]

    assert await tokens_between() == await tokens_between(begin_time=-3600, end_time=3600) == [LENGTH]
    assert await tokens_between(begin_time=3600) == await tokens_between(end_time=-3600) == []
    failure = await failure_of(tokens_between(begin_time=1, end_time=0))
    assert (failure.reason, failure.metadata['field']) == ('INVALID_FIELD', 'end_time')
    request = wire.GetTenantUsageRequest(tenant_id='alice')
    request.begin_time.seconds = 1 << 62
    failure = await failure_of(deployment.quotas.GetTenantUsage(request, metadata=ADMIN))
    assert (failure.reason, failure.metadata['field']) == ('INVALID_FIELD', 'begin_time')


async def test_usage_is_complete_after_a_restart(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Training before a restart counts once; training while no gateway runs is counted later."""
    (tmp_path / 'model').mkdir()
    (tmp_path / 'gateway').mkdir()
    run = ''
    async with serving_model(tiny_llama_dir, tmp_path / 'model') as model, httpx.AsyncClient() as http:
        for number in (1, 3):
            async with running_gateway(tmp_path / 'gateway', upstream=model.address, internal_token='') as gateway:
                deployment = Deployment(gateway, model, http, ADMIN_KEY, run)
                run = run or await deployment.create('r1')
                await deployment.execute(number, forward_backward=forward_backward())
                used = await deployment.wait_for_usage(lambda item, number=number: item.operation_count == number)
                assert used.trained_token_count == number * LENGTH
            if number == 1:
                await model.execute(run, 2, tenant='default', forward_backward=forward_backward())
