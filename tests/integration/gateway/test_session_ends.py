"""Tests of the end of sessions with a real model service: adapters are saved, parked and restored bitwise."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.checkpoint_service import as_tenant
from fixtures.future_driver import driven_gateway
from fixtures.model_service import RunningModel, draw_example, forward_backward, operation_of, serving_model
from fixtures.running_gateway import ADMIN, ADMIN_KEY, RunningGateway, failure_of, running_gateway
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, version_service_pb2
from twinkle.api.gateway.v1 import (
    catalogue_service_pb2,
    catalogue_service_pb2_grpc,
    quota_service_pb2,
    quota_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)
from twinkle.api.model.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    operation_pb2,
    training_config_pb2,
    training_service_pb2,
    training_service_pb2_grpc,
)
from twinkle_services.gateway.keys.rules import Tenant
from twinkle_services.gateway.keys.sql import SqlTenantStore
from twinkle_services.gateway.sessions.rules import Session, SessionState
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.failpoints import SESSION_FAILPOINTS

pytestmark = pytest.mark.timeout(300)

LIFETIME = timedelta(minutes=5)
LORA = training_config_pb2.LoraConfig(lora_rank=4, lora_dropout=0.1, seed=3)
EXPIRED = session_service_pb2.SESSION_STATE_EXPIRED
ACTIVE = session_service_pb2.SESSION_STATE_ACTIVE


@dataclass
class Deployment:
    """A gateway with a model service, and clients of the gateway's gRPC and Tinker APIs."""

    model: RunningModel
    gateway: RunningGateway
    http: httpx.AsyncClient

    @property
    def sessions(self) -> session_service_pb2_grpc.SessionServiceStub:
        """Stub of the session service at the gateway."""
        return session_service_pb2_grpc.SessionServiceStub(self.gateway.channel)

    @property
    def adapters(self) -> adapter_service_pb2_grpc.AdapterServiceStub:
        """Stub of the adapter service at the gateway."""
        return adapter_service_pb2_grpc.AdapterServiceStub(self.gateway.channel)

    async def create_session(self, request_id: str) -> str:
        request = session_service_pb2.CreateSessionRequest(request_id=request_id)
        return (await self.sessions.CreateSession(request, metadata=ADMIN)).session.session_id

    async def session(self, session_id: str) -> session_service_pb2.Session:
        request = session_service_pb2.GetSessionRequest(session_id=session_id)
        return (await self.sessions.GetSession(request, metadata=ADMIN)).session

    async def heartbeat(self, session_id: str) -> session_service_pb2.Session:
        request = session_service_pb2.HeartbeatRequest(session_id=session_id)
        return (await self.sessions.Heartbeat(request, metadata=ADMIN)).session

    async def create_adapter(self, session_id: str, request_id: str, **fields: Any) -> str:
        """Create an adapter in a session, and return its id."""
        request = adapter_service_pb2.CreateAdapterRequest(
            request_id=request_id, base_model=self.model.base_model, session_id=session_id, **fields
        )
        return (await self.adapters.CreateAdapter(request, metadata=ADMIN)).adapter.adapter_id

    async def train(self, adapter_id: str, numbers: Sequence[int]) -> list[Any]:
        """Run the operations with these numbers and return their results."""
        training = training_service_pb2_grpc.TrainingServiceStub(self.gateway.channel)
        results: list[Any] = []
        for number in numbers:
            request = training_service_pb2.ExecuteRequest(operation=operation_of(adapter_id, number, **verb_of(number)))
            results.append(comparable_part((await training.Execute(request, metadata=ADMIN)).result))
        return results

    async def parked_by_id(self, **fields: Any) -> dict[str, bool]:
        """Return whether each listed adapter is parked, by its id."""
        response = await self.adapters.ListAdapters(
            adapter_service_pb2.ListAdaptersRequest(page_size=1000, **fields), metadata=ADMIN
        )
        return {adapter.adapter_id: adapter.is_parked for adapter in response.adapters}

    def in_memory(self) -> set[str]:
        """Return the ids of the adapters in the engine's memory."""
        return set(self.model.backend.engine.adapter_ids)


def verb_of(number: int) -> dict[str, Any]:
    """Return the verb for a sequence number: 9 is a publication, other odd numbers are batches, others are steps."""
    if number == 9:
        return {'publish_version': operation_pb2.PublishVersion()}
    if number % 2:
        return {'forward_backward': forward_backward([draw_example(seed=number), draw_example(9, seed=number + 50)])}
    return {'clip_grad_and_step': operation_pb2.ClipGradAndStep(max_grad_norm=1.0)}


def comparable_part(result: Any) -> Any:
    """Return the part of a result that must be equal in two runs."""
    match result.WhichOneof('outcome'):
        case 'forward':
            return result.forward.loss
        case 'step':
            return result.step.step_count, result.step.grad_norm
        case _:
            return result.publish.digest


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition holds; the timeout of the test limits the wait."""
    while not await condition():  # noqa: ASYNC110 (services send no event)
        await asyncio.sleep(0)


@pytest.fixture
async def deployment(tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Deployment]:
    """A deployment with a fake clock; its gateway checks sessions twenty times per second."""
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
            heartbeat_interval=timedelta(milliseconds=50),
            session_lifetime=LIFETIME,
        ) as gateway,
        httpx.AsyncClient(
            base_url=f'http://{gateway.http_address}/api/v1', headers={'x-api-key': ADMIN_KEY}, timeout=60
        ) as http,
    ):
        yield Deployment(model, gateway, http)


async def test_training_continues_bitwise_after_an_expiry(deployment: Deployment) -> None:
    """A run whose session expires during training has results bitwise equal to those of an uninterrupted run."""
    uninterrupted = await deployment.create_adapter(
        await deployment.create_session('uninterrupted'), 'uninterrupted', lora_config=LORA
    )
    expected = await deployment.train(uninterrupted, range(1, 10))
    session_id = await deployment.create_session('expiring')
    adapter_id = await deployment.create_adapter(session_id, 'expiring', lora_config=LORA)
    # The session expires after one step, with an accumulated gradient for the next step.
    found = await deployment.train(adapter_id, range(1, 4))
    assert adapter_id in deployment.in_memory()
    deployment.gateway.clock.advance(LIFETIME + timedelta(seconds=1))
    await wait_until(lambda: _has_saved(deployment, session_id))
    session = await deployment.session(session_id)
    path = f'twinkle://{adapter_id}/weights/session-expired-1'
    assert (session.state, list(session.checkpoint_paths)) == (EXPIRED, [path])
    # The other session expires at the same time, but its run may be parked later.
    await wait_until(lambda: _is_memory_empty(deployment))
    assert await deployment.parked_by_id(session_id=session_id) == {adapter_id: True}
    assert not deployment.in_memory()
    await wait_until(lambda: _is_in_catalogue(deployment, adapter_id, 'session-expired-1'))
    assert (await deployment.heartbeat(session_id)).state == ACTIVE
    found += await deployment.train(adapter_id, range(4, 10))
    assert found == expected
    copy_id = await deployment.create_adapter(
        session_id, 'copy', checkpoint_path=path, is_optimizer_included=True, lora_config=LORA
    )
    response = await deployment.adapters.GetAdapter(
        adapter_service_pb2.GetAdapterRequest(adapter_id=copy_id), metadata=ADMIN
    )
    assert (response.adapter.step_count, response.adapter.checkpoint_path) == (1, path)


async def test_operation_restores_a_parked_adapter(deployment: Deployment) -> None:
    """An operation restores a parked adapter without a heartbeat, and the next expiry saves the adapter once more."""
    session_id = await deployment.create_session('native')
    adapter_id = await deployment.create_adapter(session_id, 'native', lora_config=LORA)
    await deployment.train(adapter_id, range(1, 3))
    deployment.gateway.clock.advance(LIFETIME + timedelta(seconds=1))
    await wait_until(lambda: _has_saved(deployment, session_id))
    await deployment.train(adapter_id, range(3, 5))
    assert await deployment.parked_by_id() == {adapter_id: False}
    await deployment.heartbeat(session_id)
    deployment.gateway.clock.advance(LIFETIME + timedelta(seconds=1))
    path = f'twinkle://{adapter_id}/weights/session-expired-2'
    await wait_until(lambda: _has_saved(deployment, session_id, path))
    request = checkpoint_service_pb2.ListCheckpointsRequest(adapter_id=adapter_id)
    listed = await _stub_of_checkpoints(deployment).ListCheckpoints(request, metadata=as_tenant('default'))
    assert {item.path.rpartition('/')[2] for item in listed.checkpoints} == {'session-expired-1', 'session-expired-2'}
    assert all(item.is_optimizer_included for item in listed.checkpoints)


async def test_storage_quota_does_not_prevent_the_save_of_an_expired_session(deployment: Deployment) -> None:
    """The save of an expired session may exceed the storage quota; later saves are refused until space is free."""
    request = quota_service_pb2.SetQuotaRequest(tenant_id='default', quota=quota_service_pb2.Quota(stored_bytes=1))
    await quota_service_pb2_grpc.QuotaServiceStub(deployment.gateway.channel).SetQuota(request, metadata=ADMIN)
    session_id = await deployment.create_session('full')
    saved, unsaved = [
        await deployment.create_adapter(session_id, name, lora_config=LORA) for name in ('saved', 'unsaved')
    ]
    for adapter_id in (saved, unsaved):
        await deployment.train(adapter_id, range(1, 3))
    await _save(deployment, saved, 'one')
    await wait_until(lambda: _is_in_catalogue(deployment, saved, 'one'))
    assert (await failure_of(_save(deployment, unsaved, 'two'))).reason == 'QUOTA_EXCEEDED'

    deployment.gateway.clock.advance(LIFETIME + timedelta(seconds=1))
    await wait_until(lambda: _has_saved(deployment, session_id, f'twinkle://{unsaved}/weights/session-expired-1'))
    await wait_until(lambda: _is_in_catalogue(deployment, unsaved, 'session-expired-1'))
    await deployment.heartbeat(session_id)
    await _delete_checkpoint(deployment, saved, 'one')
    assert (await failure_of(_save(deployment, unsaved, 'two'))).reason == 'QUOTA_EXCEEDED'
    await _delete_checkpoint(deployment, unsaved, 'session-expired-1')
    await _save(deployment, unsaved, 'two')


@pytest.mark.parametrize(
    ('reason', 'names'),
    [
        (session_service_pb2.FINISH_REASON_SUCCESS, []),
        (session_service_pb2.FINISH_REASON_INTERRUPTED, ['session-ended-1']),
    ],
)
async def test_finished_session_frees_its_memory(deployment: Deployment, reason: Any, names: list[str]) -> None:
    """Adapters of a finished session are parked, and saved only if its client did not report success."""
    session_id = await deployment.create_session('done')
    adapter_id = await deployment.create_adapter(session_id, 'done', lora_config=LORA)
    await deployment.train(adapter_id, range(1, 3))
    request = session_service_pb2.FinishSessionRequest(session_id=session_id, reason=reason)
    await deployment.sessions.FinishSession(request, metadata=ADMIN)

    async def is_parked() -> bool:
        return (await deployment.parked_by_id())[adapter_id]

    await wait_until(is_parked)
    assert not deployment.in_memory()
    if names:
        await wait_until(lambda: _has_saved(deployment, session_id))
    paths = (await deployment.session(session_id)).checkpoint_paths
    assert [path.rpartition('/')[2] for path in paths] == names


async def test_weights_of_a_tinker_sampler_are_unpinned_at_the_end_of_its_session(deployment: Deployment) -> None:
    """An expired session unpins its sampling handle's version, and shows Tinker clients the saved checkpoint."""
    response = await deployment.http.post('create_session', json={'tags': [], 'sdk_version': '0.38.0'})
    session_id = response.json()['session_id']
    model = {'session_id': session_id, 'model_seq_id': 0, 'base_model': deployment.model.base_model}
    await _wait_for_outcome(deployment, 'create_model', {**model, 'lora_config': {'rank': 4, 'seed': 1}})
    model_id = f'{session_id}:train:0'
    await deployment.train(model_id, range(1, 3))
    body = {'model_id': model_id, 'seq_id': 1, 'sampling_session_seq_id': 0, 'type': 'save_weights_for_sampler'}
    await _wait_for_outcome(deployment, 'save_weights_for_sampler', body)
    assert await _is_pinned(deployment, model_id)
    deployment.gateway.clock.advance(LIFETIME + timedelta(seconds=1))
    await wait_until(lambda: _has_saved(deployment, session_id))
    assert not await _is_pinned(deployment, model_id)
    shown = (await deployment.http.get(f'sessions/{session_id}')).json()
    assert shown['training_run_ids'] == [model_id]
    path = f'tinker://{model_id}/weights/session-expired-1'
    assert shown['user_metadata']['twinkle:saved_checkpoints'] == path
    listed = (await deployment.http.get(f'training_runs/{model_id}/checkpoints')).json()['checkpoints']
    assert path in {item['tinker_path'] for item in listed}


@pytest.mark.slow
async def test_killed_settlement_resumes_and_saves_once(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """If a kill at any failpoint interrupts the end of a session, the next gateway continues it and saves once."""
    state_dir = tmp_path / 'gateway'
    async with serving_model(tiny_llama_dir, tmp_path / 'model') as model:
        adapter = await model.create(session_id='ses-1', lora_config=LORA)
        adapter_id = adapter.adapter_id
        for number in (1, 2):
            await model.result(adapter_id, number, **verb_of(number))
        database = await Database.open(f'sqlite:///{state_dir / "gateway.db"}')
        store = SqlSessionStore(database)
        await SqlTenantStore(database).add_if_absent(
            Tenant(tenant_id='alice', display_name='', create_time=datetime.now(UTC))
        )
        await store.add_if_absent(_inactive_session())
        settings = {
            'state_dir': state_dir,
            'upstreams.model': model.address,
            'upstreams.checkpoint': model.checkpoints.address,
            'heartbeat_interval': 0.05,
            'session_lifetime': 0.2,
        }
        try:
            for failpoint in SESSION_FAILPOINTS:
                async with driven_gateway(settings, failpoints=failpoint) as driver:
                    await driver.process.wait()
            found = await store.get('alice', 'ses-1')
        finally:
            await database.close()
        assert found is not None
        path = f'twinkle://{adapter_id}/weights/session-expired-1'
        assert (found.state, found.is_settled, found.checkpoint_paths) == (SessionState.EXPIRED, True, (path,))
        request = checkpoint_service_pb2.ListCheckpointsRequest(adapter_id=adapter_id)
        listed = await _checkpoint_stub(model).ListCheckpoints(request, metadata=as_tenant('alice'))
        assert [item.path for item in listed.checkpoints] == [path]
        assert adapter_id not in model.backend.engine.adapter_ids
        assert (await model.result(adapter_id, 3, **verb_of(3))).forward.loss > 0


def _inactive_session() -> Session:
    moment = datetime.now(UTC) - timedelta(hours=1)
    return Session(
        session_id='ses-1',
        tenant_id='alice',
        request_id='rq-1',
        state=SessionState.ACTIVE,
        client='test',
        create_time=moment,
        heartbeat_time=moment,
    )


async def _is_memory_empty(deployment: Deployment) -> bool:
    return not deployment.in_memory()


async def _has_saved(deployment: Deployment, session_id: str, path: str = '') -> bool:
    paths = (await deployment.session(session_id)).checkpoint_paths
    return path in paths if path else bool(paths)


async def _is_in_catalogue(deployment: Deployment, run_id: str, name: str) -> bool:
    stub = catalogue_service_pb2_grpc.CatalogueServiceStub(deployment.gateway.channel)
    request = catalogue_service_pb2.ListRunCheckpointsRequest(run_id=run_id)
    response = await stub.ListRunCheckpoints(request, metadata=ADMIN)
    return any(item.name == name and item.is_optimizer_included for item in response.checkpoints)


async def _save(deployment: Deployment, adapter_id: str, name: str) -> None:
    operation = operation_of(adapter_id, 3, save=operation_pb2.Save(name=name, is_optimizer_included=True))
    training = training_service_pb2_grpc.TrainingServiceStub(deployment.gateway.channel)
    await training.Execute(training_service_pb2.ExecuteRequest(operation=operation), metadata=ADMIN)


async def _delete_checkpoint(deployment: Deployment, run_id: str, name: str) -> None:
    request = checkpoint_service_pb2.DeleteCheckpointRequest(checkpoint_path=f'twinkle://{run_id}/weights/{name}')
    await _stub_of_checkpoints(deployment).DeleteCheckpoint(request, metadata=as_tenant('default'))

    async def is_deleted() -> bool:
        return not await _is_in_catalogue(deployment, run_id, name)

    await wait_until(is_deleted)


async def _wait_for_outcome(deployment: Deployment, path: str, body: dict[str, Any]) -> None:
    response = await deployment.http.post(path, json=body)
    assert response.status_code == 200, response.text
    while True:
        done = await deployment.http.post('retrieve_future', json={'request_id': response.json()['request_id']})
        assert done.status_code == 200, done.text
        if done.json().get('type') != 'try_again':
            assert 'error' not in done.json(), done.text
            return


async def _is_pinned(deployment: Deployment, model_id: str) -> bool:
    stub = deployment.model.checkpoints.versions
    request = version_service_pb2.GetVersionRequest(adapter_id=model_id, version=1)
    return (await stub.GetVersion(request, metadata=as_tenant('default'))).version.is_pinned


def _stub_of_checkpoints(deployment: Deployment) -> Any:
    return _checkpoint_stub(deployment.model)


def _checkpoint_stub(model: RunningModel) -> Any:
    return model.checkpoints.checkpoints
