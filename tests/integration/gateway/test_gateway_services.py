"""Tests of the contracts that the gateway implements: keys, sessions, catalogue and server information."""

import asyncio
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.gateway_upstream import Upstream, adapter_event, wait_until
from fixtures.running_gateway import ADMIN, ADMIN_KEY, RunningGateway, bearer, failure_of, running_gateway
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2
from twinkle.api.gateway.v1 import (
    catalogue_service_pb2,
    catalogue_service_pb2_grpc,
    key_service_pb2,
    key_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)
from twinkle.api.model.v1 import adapter_service_pb2
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc


def sessions(gateway: RunningGateway) -> Any:
    return session_service_pb2_grpc.SessionServiceStub(gateway.channel)


def catalogue(gateway: RunningGateway) -> Any:
    return catalogue_service_pb2_grpc.CatalogueServiceStub(gateway.channel)


def checkpoint_event(name: str, *, tenant_id: str = 'default') -> Any:
    """Return the event of a checkpoint service about a checkpoint."""
    message = checkpoint_service_pb2.WatchCheckpointsResponse(tenant_id=tenant_id, resume_token=f'at-{name}')
    message.checkpoint.checkpoint_id = f'ad-1/weights/{name}'
    message.checkpoint.adapter_id = 'ad-1'
    message.checkpoint.name = name
    message.checkpoint.path = f'twinkle://ad-1/weights/{name}'
    message.checkpoint.size_bytes = 1 << 33
    message.checkpoint.create_time.FromSeconds(1_700_000_000)
    return message


async def list_runs(gateway: RunningGateway) -> dict[str, Any]:
    """Return the default tenant's runs by id."""
    response = await catalogue(gateway).ListRuns(catalogue_service_pb2.ListRunsRequest(), metadata=ADMIN)
    return {run.run_id: run for run in response.runs}


def _all_bytes(folder: Path) -> bytes:
    return b''.join(path.read_bytes() for path in folder.iterdir() if path.is_file())


async def test_secret_is_shown_once(gateway: RunningGateway) -> None:
    """A new key is valid, and lists of keys do not contain its secret."""
    new_key = await gateway.make_key('alice', scopes=(1, 2))
    await sessions(gateway).ListSessions(session_service_pb2.ListSessionsRequest(), metadata=bearer(new_key.secret))
    stub = key_service_pb2_grpc.KeyServiceStub(gateway.channel)
    listed = await stub.ListKeys(key_service_pb2.ListKeysRequest(tenant_id='alice'), metadata=ADMIN)
    assert list(listed.keys) == [new_key.key]
    assert new_key.secret.startswith(f'tml-{new_key.key.key_id}-')
    assert new_key.secret not in str(listed)
    tenants = await stub.ListTenants(key_service_pb2.ListTenantsRequest(), metadata=ADMIN)
    assert {tenant.tenant_id for tenant in tenants.tenants} == {'alice', 'default'}


async def test_secrets_are_neither_stored_nor_logged(
    gateway: RunningGateway, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No file of the state folder and no log line contains a secret."""
    new_key = await gateway.make_key('alice')
    await failure_of(catalogue(gateway).GetRun(catalogue_service_pb2.GetRunRequest(), metadata=bearer(new_key.secret)))
    logged = ''
    # The gateway may log the call after the response.
    while 'GetRun' not in logged:
        logged += ''.join(capfd.readouterr())
        await asyncio.sleep(0)
    written = _all_bytes(tmp_path) + logged.encode()
    for secret in (new_key.secret, new_key.secret.rpartition('-')[2], ADMIN_KEY):
        assert secret.encode() not in written


async def test_session_expires_and_is_reactivated(gateway: RunningGateway) -> None:
    """A session without heartbeats expires, a heartbeat reactivates it, and a finished session refuses heartbeats."""
    stub = sessions(gateway)
    request = session_service_pb2.CreateSessionRequest(request_id='one', client='test', user_metadata={'a': 'b'})
    created = await stub.CreateSession(request, metadata=ADMIN)
    assert created.heartbeat_interval.seconds == 30
    assert (await stub.CreateSession(request, metadata=ADMIN)).session == created.session
    session_id = created.session.session_id

    gateway.clock.advance(timedelta(minutes=6))
    found = await stub.GetSession(session_service_pb2.GetSessionRequest(session_id=session_id), metadata=ADMIN)
    assert found.session.state == session_service_pb2.SESSION_STATE_EXPIRED
    heartbeat = session_service_pb2.HeartbeatRequest(session_id=session_id)
    assert (await stub.Heartbeat(heartbeat, metadata=ADMIN)).session.state == session_service_pb2.SESSION_STATE_ACTIVE

    finish = session_service_pb2.FinishSessionRequest(session_id=session_id)
    for _ in range(2):
        finished = await stub.FinishSession(finish, metadata=ADMIN)
        assert finished.session.state == session_service_pb2.SESSION_STATE_FINISHED
    failure = await failure_of(stub.Heartbeat(heartbeat, metadata=ADMIN))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, 'SESSION_FINISHED')


async def test_ids_of_another_tenant_are_not_found(gateway: RunningGateway, upstream: Upstream) -> None:
    """Calls with another tenant's session or run fail exactly like calls with an unknown id."""
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-1'))
    await wait_until(lambda: list_runs(gateway), lambda runs: 'ad-1' in runs)
    request = session_service_pb2.CreateSessionRequest(request_id='one', client='test')
    session_id = (await sessions(gateway).CreateSession(request, metadata=ADMIN)).session.session_id
    mallory = bearer((await gateway.make_key('mallory')).secret)
    calls = [
        (sessions(gateway).GetSession, session_service_pb2.GetSessionRequest, 'session_id', session_id),
        (sessions(gateway).Heartbeat, session_service_pb2.HeartbeatRequest, 'session_id', session_id),
        (sessions(gateway).FinishSession, session_service_pb2.FinishSessionRequest, 'session_id', session_id),
        (catalogue(gateway).GetRun, catalogue_service_pb2.GetRunRequest, 'run_id', 'ad-1'),
    ]
    for call, request_class, field, foreign_id in calls:
        absent_id = re.sub('.$', '_', foreign_id)
        foreign = await failure_of(call(request_class(**{field: foreign_id}), metadata=mallory))
        absent = await failure_of(call(request_class(**{field: absent_id}), metadata=mallory))
        assert foreign.code is absent.code is grpc.StatusCode.NOT_FOUND
        assert foreign.reason == absent.reason
        assert foreign.message.replace(foreign_id, absent_id) == absent.message
    empty = catalogue_service_pb2.ListRunCheckpointsRequest(run_id='ad-1')
    assert not (await catalogue(gateway).ListRunCheckpoints(empty, metadata=mallory)).checkpoints
    assert not (
        await sessions(gateway).ListSessions(session_service_pb2.ListSessionsRequest(), metadata=mallory)
    ).sessions


async def test_errors_of_bad_requests_name_the_field(gateway: RunningGateway) -> None:
    """The error for a missing id or a negative page size names the field; an invalid page token has its own reason."""
    cases = [
        (catalogue(gateway).GetRun(catalogue_service_pb2.GetRunRequest(), metadata=ADMIN), 'run_id'),
        (
            catalogue(gateway).ListRuns(catalogue_service_pb2.ListRunsRequest(page_size=-1), metadata=ADMIN),
            'page_size',
        ),
        (
            sessions(gateway).CreateSession(session_service_pb2.CreateSessionRequest(), metadata=ADMIN),
            'request_id',
        ),
    ]
    for call, field in cases:
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_FIELD')
        assert failure.metadata == {'field': field}
    token = catalogue_service_pb2.ListRunsRequest(page_token='garbage')
    assert (await failure_of(catalogue(gateway).ListRuns(token, metadata=ADMIN))).reason == 'INVALID_PAGE_TOKEN'


async def test_runs_follow_the_model_service(gateway: RunningGateway, upstream: Upstream) -> None:
    """Adapters appear and change in the catalogue, and become inactive when they are deleted."""
    changes = upstream.adapters.watch.changes
    changes.put_nowait(adapter_event('ad-1', step_count=1))
    changes.put_nowait(adapter_event('ad-2', session_id='se-1'))
    changes.put_nowait(adapter_event('ad-3', tenant_id='alice'))
    changes.put_nowait(adapter_event('ad-1', step_count=5, version=2))
    runs = await wait_until(lambda: list_runs(gateway), lambda found: 'ad-1' in found and found['ad-1'].step_count == 5)
    assert set(runs) == {'ad-1', 'ad-2'}
    assert (runs['ad-1'].version, runs['ad-1'].lora_rank, runs['ad-1'].base_model) == (2, 8, 'tiny')
    assert runs['ad-1'].is_active

    deletion = adapter_service_pb2.WatchAdaptersResponse(tenant_id='default', resume_token='deleted')
    deletion.deletion.adapter_id = 'ad-2'
    changes.put_nowait(deletion)
    await wait_until(lambda: list_runs(gateway), lambda found: not found['ad-2'].is_active)
    of_session = catalogue_service_pb2.ListRunsRequest(session_id='se-1')
    assert [run.run_id for run in (await catalogue(gateway).ListRuns(of_session, metadata=ADMIN)).runs] == ['ad-2']

    first = await catalogue(gateway).ListRuns(catalogue_service_pb2.ListRunsRequest(page_size=1), metadata=ADMIN)
    request = catalogue_service_pb2.ListRunsRequest(page_size=1, page_token=first.next_page_token)
    second = await catalogue(gateway).ListRuns(request, metadata=ADMIN)
    assert [run.run_id for run in (*first.runs, *second.runs)] == ['ad-2', 'ad-1']
    assert second.next_page_token == ''


async def test_checkpoints_follow_the_checkpoint_service(gateway: RunningGateway, upstream: Upstream) -> None:
    """Checkpoints appear in the catalogue as reported, and are removed when they are deleted."""
    changes = upstream.checkpoints.watch.changes
    events = [checkpoint_event('one'), checkpoint_event('two'), checkpoint_event('three', tenant_id='alice')]
    for event in events:
        changes.put_nowait(event)
    stub, request = catalogue(gateway), catalogue_service_pb2.ListRunCheckpointsRequest(run_id='ad-1')

    async def listed() -> list[Any]:
        return list((await stub.ListRunCheckpoints(request, metadata=ADMIN)).checkpoints)

    assert await wait_until(listed, lambda found: len(found) == 2) == [events[1].checkpoint, events[0].checkpoint]
    deletion = checkpoint_service_pb2.WatchCheckpointsResponse(tenant_id='default', resume_token='deleted')
    deletion.deletion.checkpoint_id = 'ad-1/weights/one'
    changes.put_nowait(deletion)
    assert await wait_until(listed, lambda found: len(found) == 1) == [events[1].checkpoint]


async def test_catalogue_is_available_without_its_services(tmp_path: Path) -> None:
    """Runs stay listed while the model service is down; after its restart, runs that it lost become inactive."""
    first = Upstream()
    first.adapters.watch.snapshot = [adapter_event('ad-1'), adapter_event('ad-2')]
    async with first.serving():
        address = first.address
        async with running_gateway(tmp_path, upstream=address) as gateway:
            await wait_until(lambda: list_runs(gateway), lambda runs: set(runs) == {'ad-1', 'ad-2'})
    async with running_gateway(tmp_path, upstream=address) as gateway:
        assert all(run.is_active for run in (await list_runs(gateway)).values())
        second = Upstream()
        second.adapters.watch.snapshot = [adapter_event('ad-2', step_count=9)]
        async with second.serving(listen=address):
            runs = await wait_until(lambda: list_runs(gateway), lambda found: not found['ad-1'].is_active)
            assert (runs['ad-2'].is_active, runs['ad-2'].step_count) == (True, 9)


async def test_server_info_covers_all_services(gateway: RunningGateway) -> None:
    """The server information lists the gateway, then the other services, with the support of each method."""
    stub = server_service_pb2_grpc.ServerServiceStub(gateway.channel)
    info = await stub.GetServerInfo(server_service_pb2.GetServerInfoRequest(), metadata=ADMIN)
    assert info.services[0].service == 'gateway'
    assert all(service.is_reachable for service in info.services)
    support = {item.method: item.is_supported for item in info.services[0].methods}
    assert support['twinkle.api.gateway.v1.CatalogueService/ListRuns']
    assert support['twinkle.api.model.v1.AdapterService/GetAdapter']
    assert not support['twinkle.api.model.v1.AdapterService/CreateAdapter']
    assert support['twinkle.api.gateway.v1.CatalogueService/GetUsage']
    assert support['twinkle.api.gateway.v1.QuotaService/SetQuota']
    assert support['twinkle.api.gateway.v1.FleetService/Drain']


async def test_server_info_lists_unreachable_services(tmp_path: Path) -> None:
    """The server information lists services that are not deployed as unreachable."""
    async with running_gateway(tmp_path) as gateway:
        stub = server_service_pb2_grpc.ServerServiceStub(gateway.channel)
        info = await stub.GetServerInfo(server_service_pb2.GetServerInfoRequest(), metadata=ADMIN)
        reachable = {service.service: service.is_reachable for service in info.services}
        assert reachable == {
            'gateway': True,
            'model': False,
            'sampler': False,
            'data': False,
            'checkpoint': False,
        }
