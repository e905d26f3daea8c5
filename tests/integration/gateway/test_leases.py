"""Tests of a replica's leases through the gateway, with a real model service."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fixtures.model_service import RunningModel, batch_of, draw_example, operation_of, serving_model
from fixtures.running_gateway import RunningGateway, bearer, failure_of, running_gateway
from twinkle.api.gateway.v1 import key_service_pb2, session_service_pb2, session_service_pb2_grpc
from twinkle.api.model.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    training_service_pb2,
    training_service_pb2_grpc,
)

LIFETIME = timedelta(minutes=5)
TRAIN = (key_service_pb2.SCOPE_TRAIN,)
LEASE = (*TRAIN, key_service_pb2.SCOPE_FULL_PARAMETERS)
FORWARD = {'forward_only': {'batch': batch_of([draw_example(seed=1)])}}


@dataclass
class Tenant:
    """A tenant with a key and a session."""

    gateway: RunningGateway
    base_model: str
    key: tuple[tuple[str, str], ...]
    session_id: str

    @property
    def adapters(self) -> adapter_service_pb2_grpc.AdapterServiceStub:
        """Stub of the adapter service at the gateway."""
        return adapter_service_pb2_grpc.AdapterServiceStub(self.gateway.channel)

    def create(self, request_id: str, **fields: Any) -> Any:
        request = adapter_service_pb2.CreateAdapterRequest(
            request_id=request_id, base_model=self.base_model, session_id=self.session_id, **fields
        )
        return self.adapters.CreateAdapter(request, metadata=self.key)

    def execute(self, adapter_id: str, number: int, **verb: Any) -> Any:
        request = training_service_pb2.ExecuteRequest(operation=operation_of(adapter_id, number, **verb))
        return training_service_pb2_grpc.TrainingServiceStub(self.gateway.channel).Execute(request, metadata=self.key)

    async def finish(self) -> None:
        request = session_service_pb2.FinishSessionRequest(
            session_id=self.session_id, reason=session_service_pb2.FINISH_REASON_INTERRUPTED
        )
        await session_service_pb2_grpc.SessionServiceStub(self.gateway.channel).FinishSession(
            request, metadata=self.key
        )


@dataclass
class Deployment:
    """A gateway and a model service."""

    model: RunningModel
    gateway: RunningGateway

    async def tenant(self, tenant_id: str, scopes: tuple[int, ...]) -> Tenant:
        """Create a key with these scopes and a session, and return them as a `Tenant`."""
        key = bearer((await self.gateway.make_key(tenant_id, scopes=scopes)).secret)
        sessions = session_service_pb2_grpc.SessionServiceStub(self.gateway.channel)
        request = session_service_pb2.CreateSessionRequest(request_id='session')
        session_id = (await sessions.CreateSession(request, metadata=key)).session.session_id
        return Tenant(self.gateway, self.model.base_model, key, session_id)


@pytest.fixture
async def deployment(tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Deployment]:
    """A deployment that allows leases; its gateway checks sessions twenty times per second."""
    for name in ('model', 'gateway'):
        (tmp_path / name).mkdir()
    async with (
        serving_model(tiny_llama_dir, tmp_path / 'model', full_parameters=True) as model,
        running_gateway(
            tmp_path / 'gateway',
            upstream=model.address,
            checkpoint=model.checkpoints.address,
            internal_token='',
            heartbeat_interval=timedelta(milliseconds=50),
            session_lifetime=LIFETIME,
        ) as gateway,
    ):
        yield Deployment(model, gateway)


async def until_parked(deployment: Deployment) -> None:
    """Wait until no adapter is in the engine; the timeout of the test limits the wait."""
    watch = adapter_service_pb2.ListAdaptersRequest()
    while deployment.model.backend.engine.adapter_ids:
        await deployment.model.adapters.ListAdapters(watch)


async def until_lease_ended(holder: Tenant, adapter_id: str) -> None:
    """Wait until a run has no lease; the timeout of the test limits the wait."""
    request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id)
    while (await holder.adapters.GetAdapter(request, metadata=holder.key)).adapter.has_lease:
        pass


async def trained_victim(deployment: Deployment) -> tuple[Tenant, str, bytes]:
    """Create an adapter; return its tenant, its id, and the log-probabilities of its first operation."""
    victim = await deployment.tenant('victim', TRAIN)
    adapter_id = (await victim.create('lora', lora_config={'lora_rank': 4, 'seed': 3})).adapter.adapter_id
    return victim, adapter_id, logprobs_of(await victim.execute(adapter_id, 1, **FORWARD))


def logprobs_of(response: Any) -> bytes:
    """Return the log-probabilities of a result."""
    return response.result.forward.logprobs[0].data


async def test_lease_needs_permission_and_a_free_replica(deployment: Deployment) -> None:
    """A lease is refused without the scope, or while another tenant's adapter is resident. The adapter stays usable."""
    victim, adapter_id, expected = await trained_victim(deployment)
    ordinary = await deployment.tenant('ordinary', (1, 2, 3))
    assert (await failure_of(ordinary.create('full', full_parameters={}))).reason == 'SCOPE_MISSING'
    holder = await deployment.tenant('holder', LEASE)
    assert (await failure_of(holder.create('full', full_parameters={}))).reason == 'REPLICA_IN_USE'
    assert logprobs_of(await victim.execute(adapter_id, 2, **FORWARD)) == expected


@pytest.mark.parametrize('end', ['expiry', 'finish', 'operator'])
async def test_lease_of_an_absent_holder_ends(deployment: Deployment, end: str) -> None:
    """A lease ends when its session ends or an operator ends it; then the base weights are restored.

    After its session has ended, the run continues with its trained weights.
    """
    victim, adapter_id, expected = await trained_victim(deployment)
    await victim.finish()
    await until_parked(deployment)
    holder = await deployment.tenant('holder', LEASE)
    run = (await holder.create('full', full_parameters={'target_modules': ['mlp']})).adapter
    assert run.has_lease
    await holder.execute(run.adapter_id, 1, forward_backward=FORWARD['forward_only'])
    await holder.execute(run.adapter_id, 2, clip_grad_and_step={})
    trained = logprobs_of(await holder.execute(run.adapter_id, 3, **FORWARD))
    assert (await failure_of(victim.execute(adapter_id, 2, **FORWARD))).reason == 'REPLICA_LEASED'
    await ENDS[end](deployment, holder)
    await until_lease_ended(holder, run.adapter_id)
    assert logprobs_of(await victim.execute(adapter_id, 2, **FORWARD)) == expected
    assert (await failure_of(holder.execute(run.adapter_id, 4, **FORWARD))).reason == 'REPLICA_IN_USE'
    await victim.adapters.DeleteAdapter(
        adapter_service_pb2.DeleteAdapterRequest(adapter_id=adapter_id), metadata=victim.key
    )
    if end != 'operator':
        assert logprobs_of(await holder.execute(run.adapter_id, 4, **FORWARD)) == trained


async def _expire(deployment: Deployment, holder: Tenant) -> None:
    del holder
    deployment.gateway.clock.advance(LIFETIME + timedelta(seconds=1))


async def _finish(deployment: Deployment, holder: Tenant) -> None:
    del deployment
    await holder.finish()


async def _end_as_operator(deployment: Deployment, holder: Tenant) -> None:
    request = adapter_service_pb2.EndLeaseRequest(base_model=holder.base_model)
    refused = await failure_of(holder.adapters.EndLease(request, metadata=holder.key))
    assert refused.reason == 'SCOPE_MISSING'
    operator = await deployment.tenant('operator', (key_service_pb2.SCOPE_OPERATOR,))
    assert (await operator.adapters.EndLease(request, metadata=operator.key)).adapter_id
    assert not (await operator.adapters.EndLease(request, metadata=operator.key)).adapter_id


ENDS: dict[str, Callable[[Deployment, Tenant], Awaitable[None]]] = {
    'expiry': _expire,
    'finish': _finish,
    'operator': _end_as_operator,
}
