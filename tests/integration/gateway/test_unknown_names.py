"""Tests that no object, metric or log of the gateway grows with names that callers invent."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fixtures.gateway_process import gateway_process
from fixtures.gateway_upstream import Upstream
from fixtures.growth import Sizes, growth, measure
from fixtures.running_gateway import RunningGateway, bearer, running_gateway
from twinkle_services.kit.telemetry import TelemetryConfig

MARK = 'madeup'
"""Part of all names that the callers invent."""
WARM_UP = 150
"""Calls after which the bounded caches of the process are full."""
CALLS = 800
MIN_GROWTH = CALLS // 4
"""Number of new items or objects that counts as growth."""
CONCURRENT = 20
END_SECONDS = 30.0
"""Timeout for the end of cancelled calls on a busy machine."""
_REFUSALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
KNOWN = '/twinkle.api.model.v1.AdapterService/GetAdapter'


def _method(number: int) -> str:
    """Return the path of an unknown method, in an unknown or a known service."""
    if number % 2:
        return f'/twinkle.api.model.v1.AdapterService/{MARK}{number}{"x" * 200}'
    return f'/{MARK}.v{number}.Service/Method'


async def _call_rpc(channel: grpc.aio.Channel, number: int, *, secret: str = '') -> None:
    """Call an unknown method and a known method with invalid metadata."""
    name = f'{MARK}{number}'
    metadata = [(name, name), ('x-request-id', name), ('traceparent', f'00-{number + 1:032x}-{number + 1:016x}-01')]
    metadata += bearer(secret) if secret else (('x-twinkle-tenant', name), ('baggage', f'{name}=1'))
    for method in (_method(number), KNOWN):
        call = channel.unary_unary(method)(b'', metadata=tuple(metadata))
        assert await call.code() in _REFUSALS or secret
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
    await watch.read()
    watch.cancel()


async def _call_http(client: httpx.AsyncClient, number: int, *, secret: str = '') -> None:
    """Call unknown paths and HTTP methods, and known paths, with made-up headers and models."""
    name = f'{MARK}{number}'
    headers = {'user-agent': f'{name}/1.0', name: name, 'cookie': f'{name}=1', 'x-request-id': name}
    if secret:
        headers['authorization'] = f'Bearer {secret}'
    body = {'model': name, 'messages': [{'role': 'user', 'content': 'x'}]}
    responses = [
        await client.get(f'/{name}/{name}', headers=headers),
        await client.request(name.upper(), '/v1/models', headers=headers),
        await client.get(f'/api/v1/training_runs/{name}?{name}=1', headers=headers),
        await client.get(f'/api/v1/files/{name}.{name}/{name}.tar', headers=headers),
        await client.post('/v1/chat/completions', headers=headers, json=body),
        await client.get(f'/console/{name}', headers=headers),
        await client.post('/console/api/login', headers=headers, json={'key': 'tml-madeup'}),
        await client.get('/console/api/session', headers={**headers, 'cookie': f'twinkle_console={name}'}),
        await client.post(f'/console/rpc/{name}/{name}', headers=headers),
    ]
    assert secret or {response.status_code for response in responses} <= {401, 404, 405}
    headers['content-type'] = 'application/grpc-web+proto'
    response = await client.post(f'/console/rpc/{name}/{name}', headers=headers, content=bytes(5))
    statuses = (b'grpc-status: 12', b'grpc-status: 16') if secret else (b'grpc-status: 16',)
    assert any(status in response.content for status in statuses)


async def _call_all(channel: grpc.aio.Channel, client: httpx.AsyncClient, numbers: range, *, secret: str = '') -> None:
    slots = asyncio.Semaphore(CONCURRENT)

    async def call(number: int) -> None:
        async with slots:
            await _call_rpc(channel, number, secret=secret)
            await _call_http(client, number, secret=secret)

    async with asyncio.TaskGroup() as tasks:
        for number in numbers:
            tasks.create_task(call(number))


@pytest.fixture
async def running(upstream: Upstream, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway that serves gRPC and HTTP."""
    async with running_gateway(tmp_path, upstream=upstream.address, http_listen='127.0.0.1:0') as gateway:
        yield gateway


@pytest.mark.slow
@pytest.mark.parametrize('has_key', [False, True])
async def test_no_object_of_the_gateway_grows_with_invented_names(running: RunningGateway, *, has_key: bool) -> None:
    """Methods, paths, models and user agents that callers invent leave no object, with or without a key."""
    secret = (await running.make_key('alice')).secret if has_key else ''
    async with httpx.AsyncClient(base_url=f'http://{running.http_address}', timeout=60) as client:
        await _call_all(running.channel, client, range(WARM_UP), secret=secret)
        before = measure()
        await _call_all(running.channel, client, range(WARM_UP, WARM_UP + CALLS), secret=secret)
        assert await _lasting_growth(before) == []


async def _lasting_growth(before: Sizes) -> list[str]:
    """Return the growth that remains after the server has ended the calls that clients cancelled."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + END_SECONDS
    found = growth(before, measure(), minimum=MIN_GROWTH)
    while found and loop.time() < give_up_at:
        await asyncio.sleep(0)
        found = growth(before, measure(), minimum=MIN_GROWTH)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def _spans(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]


def _series(page: str) -> set[str]:
    return {line.rpartition(' ')[0] for line in page.splitlines() if line and not line.startswith('#')}


async def test_calls_without_a_valid_key_leave_no_line_in_logs_and_traces(tmp_path: Path) -> None:
    """Calls without a valid key add no log line and no span."""
    log, traces = tmp_path / 'log', tmp_path / 'traces'
    async with (
        gateway_process(tmp_path, log=log, telemetry__trace_dir=traces) as gateway,
        httpx.AsyncClient(base_url=f'http://{gateway.http_address}', timeout=60) as client,
    ):
        before = log.read_bytes()
        for secret in ('', 'tml-unknown-key-of-a-stranger'):
            await _call_all(gateway.channel, client, range(100), secret=secret)
        assert log.read_bytes() == before
        secret = await gateway.make_key('alice')
        await _call_all(gateway.channel, client, range(100, 101), secret=secret)
        gateway.process.terminate()
        gateway.process.wait()
    # The tenant's calls came after the refused calls. Their spans and log lines are written, so those of the refused
    # calls would be written too.
    ids = {span['attributes'].get('twinkle.request_id', '') for span in _spans(traces)}
    assert {name for name in ids if name.startswith(MARK)} == {f'{MARK}100'}
    assert f'{MARK}100' in log.read_text()


async def test_metrics_spans_and_logs_contain_known_names_only(tmp_path: Path) -> None:
    """Invented names add no metric series; spans and logs contain them only in request ids.

    The metrics also show the longest stall of the event loop.
    """
    port, log = _free_port(), tmp_path / 'log'
    telemetry = TelemetryConfig(metrics_port=port, trace_dir=tmp_path / 'traces', is_log_json=True, log_level='DEBUG')
    settings = {f'telemetry__{name}': value for name, value in telemetry.model_dump(exclude_defaults=True).items()}
    async with gateway_process(tmp_path, log=log, **settings) as gateway, httpx.AsyncClient(timeout=60) as client:
        client.base_url = httpx.URL(f'http://{gateway.http_address}')
        secret = await gateway.make_key('alice')
        metrics = f'http://127.0.0.1:{port}/metrics'
        for key in ('', secret):
            await _call_all(gateway.channel, client, range(10), secret=key)
        before = _series((await client.get(metrics)).text)
        for key in ('', secret):
            await _call_all(gateway.channel, client, range(10, 110), secret=key)
        assert _series((await client.get(metrics)).text) == before
        assert any('method="_OTHER"' in series for series in before)
        assert any('route="_OTHER"' in series for series in before)
        (stall,) = re.findall(
            r'^twinkle_event_loop_longest_stall_seconds (\S+)', (await client.get(metrics)).text, re.MULTILINE
        )
        assert float(stall) > 0
        gateway.process.terminate()
        gateway.process.wait()
    spans = _spans(tmp_path / 'traces')
    assert any(span['name'] == '_OTHER' for span in spans)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{')]
    assert any(line.get('method') == '_OTHER' for line in lines)
    for fields in (*lines, *spans):
        fields.pop('request_id', None)
        fields.get('attributes', {}).pop('twinkle.request_id', None)
        assert not re.search(MARK, json.dumps(fields), re.IGNORECASE), fields
