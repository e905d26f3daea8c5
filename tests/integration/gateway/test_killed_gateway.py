"""Tests that acknowledged changes survive a kill of the gateway process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from fixtures.gateway_upstream import Upstream
from fixtures.running_gateway import ADMIN, ADMIN_KEY, bearer
from fixtures.source_tree import ROOT
from twinkle.api.gateway.v1 import (
    catalogue_service_pb2,
    catalogue_service_pb2_grpc,
    key_service_pb2,
    key_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)
from twinkle.api.model.v1 import adapter_service_pb2

MEMORY_LIMIT = 150 << 20


@asynccontextmanager
async def gateway_process(state_dir: Path, upstream: str) -> AsyncIterator[tuple[subprocess.Popen[bytes], Any]]:
    """Run a gateway process, and yield it with a channel to it; kill it at the end."""
    address_file = state_dir / 'address.json'
    address_file.unlink(missing_ok=True)
    settings = {
        'state_dir': state_dir,
        'address_file': address_file,
        'bootstrap_key': ADMIN_KEY,
        'internal_token': 'internal-token-of-the-tests',
        'upstreams.model': upstream,
    }
    command = [sys.executable, '-m', 'twinkle_services.gateway']
    for field, value in settings.items():
        command += ['--set', f'{field}={value}']
    process = _start(command)
    try:
        while not address_file.exists():
            assert process.poll() is None, 'the gateway process exited before it wrote its address'
            await asyncio.sleep(0)
        async with grpc.aio.insecure_channel(json.loads(address_file.read_text())['address']) as channel:
            yield process, channel
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)


async def _create_data(channel: Any) -> dict[str, Any]:
    keys = key_service_pb2_grpc.KeyServiceStub(channel)
    await keys.CreateTenant(key_service_pb2.CreateTenantRequest(tenant_id='alice'), metadata=ADMIN)
    key = await keys.CreateKey(key_service_pb2.CreateKeyRequest(tenant_id='alice', scopes=[1]), metadata=ADMIN)
    revoked = await keys.CreateKey(key_service_pb2.CreateKeyRequest(tenant_id='alice', scopes=[1]), metadata=ADMIN)
    await keys.RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=revoked.key.key_id), metadata=ADMIN)
    sessions = session_service_pb2_grpc.SessionServiceStub(channel)
    request = session_service_pb2.CreateSessionRequest(request_id='one', client='test')
    session = (await sessions.CreateSession(request, metadata=bearer(key.secret))).session
    return {'secret': key.secret, 'revoked': revoked.secret, 'session': session}


async def test_killed_gateway_keeps_keys_sessions_and_runs(tmp_path: Path) -> None:
    """All acknowledged changes, including the revocation of a key, survive a SIGKILL of the gateway."""
    services = Upstream()
    services.adapters.watch.snapshot = [_adapter_event()]
    async with services.serving():
        async with gateway_process(tmp_path, services.address) as (process, channel):
            created = await _create_data(channel)
            while not await _list_runs(channel):
                pass
            assert psutil.Process(process.pid).memory_info().rss < MEMORY_LIMIT
        services.adapters.watch.snapshot = []
    async with gateway_process(tmp_path, services.address) as (_, channel):
        sessions = session_service_pb2_grpc.SessionServiceStub(channel)
        request = session_service_pb2.GetSessionRequest(session_id=created['session'].session_id)
        found = await sessions.GetSession(request, metadata=bearer(created['secret']))
        assert found.session == created['session']
        assert [run.run_id for run in await _list_runs(channel)] == ['ad-1']
        try:
            await sessions.GetSession(request, metadata=bearer(created['revoked']))
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
        assert code is grpc.StatusCode.UNAUTHENTICATED


def _adapter_event() -> Any:
    message = adapter_service_pb2.WatchAdaptersResponse(tenant_id='default', resume_token='one')
    message.adapter.adapter_id = 'ad-1'
    message.adapter.create_time.GetCurrentTime()
    message.adapter.update_time.GetCurrentTime()
    return message


async def _list_runs(channel: Any) -> Any:
    stub = catalogue_service_pb2_grpc.CatalogueServiceStub(channel)
    return (await stub.ListRuns(catalogue_service_pb2.ListRunsRequest(), metadata=ADMIN)).runs
