"""Tests of the ports of a service that is starting: the admin port, health, and calls that arrive too early."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from fixtures.certificates import make_authority, tls_of
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc
from twinkle.hub import weight_bytes
from twinkle_services.data.config import DataConfig
from twinkle_services.kit.errors import Draining
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.server import RpcServer
from twinkle_services.kit.rpc.service_ports import ServicePorts, opened_ports
from twinkle_services.kit.rpc.status import error_from_call
from twinkle_services.kit.telemetry import AdminAddress, Readiness, serving_admin

FREE = AdminAddress('127.0.0.1:0')
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def _get(readiness: Readiness, path: str, *, method: str = 'GET') -> tuple[int, str]:
    async with httpx.AsyncClient(base_url=f'http://{readiness.address}') as client:
        response = await client.request(method, path)
    return response.status_code, response.text.strip()


async def _health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status


async def _describe(address: str) -> str:
    async with open_channel(address) as channel:
        stub = server_service_pb2_grpc.ServerServiceStub(channel)
        response = await stub.GetServerInfo(server_service_pb2.GetServerInfoRequest(), timeout=30)
    return response.services[0].service


@asynccontextmanager
async def _starting() -> AsyncIterator[tuple[ServicePorts, RpcServer]]:
    """Yield the open ports of a data service, and its server, which does not serve yet."""
    config = DataConfig()
    with serving_admin(FREE, service='data') as readiness:
        async with opened_ports(config, readiness) as ports:
            server = RpcServer(config, authenticator=InternalAuthenticator(''), endpoints=[])
            server.use_ports(ports)
            yield ports, server


async def test_readiness_follows_the_start_and_the_stop() -> None:
    """`/readyz` and the health service follow the start and the drain of a service; `/livez` always responds."""
    async with _starting() as (ports, server):
        readiness = ports.readiness
        assert await _get(readiness, '/readyz') == (503, 'starting')
        with readiness.step('load the model', base_model='tiny'):
            assert await _get(readiness, '/readyz') == (503, 'load the model')
            assert await _get(readiness, '/livez') == (200, 'ok')
            assert await _health(ports.addresses[0]) == NOT_SERVING
        await server.start()
        assert server.addresses == ports.addresses
        assert await _get(readiness, '/readyz') == (200, 'ok')
        assert await _health(server.address) == SERVING
        await server.report_not_serving()
        assert await _get(readiness, '/readyz') == (503, 'draining')
        assert await _health(server.address) == NOT_SERVING
        await server.stop(timedelta())
        assert await _get(readiness, '/livez') == (200, 'ok')


async def test_calls_during_the_start_are_refused_and_can_be_repeated() -> None:
    """A call that arrives before the service serves fails with a retryable error, and succeeds afterwards."""
    async with _starting() as (ports, server):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _describe(ports.addresses[0])
        error = error_from_call(caught.value, service='data')
        assert error.reason == Draining.reason
        assert error.retry_after is not None
        await server.start()
        assert await _describe(ports.addresses[0]) == 'data'


async def test_admin_port_serves_metrics_and_the_version() -> None:
    """The admin port serves Prometheus text and the version, lists its paths, and accepts only reads."""
    with serving_admin(FREE, service='data') as readiness:
        status, page = await _get(readiness, '/metrics')
        assert (status, 'process_resident_memory_bytes' in page) == (200, True)
        status, text = await _get(readiness, '/version')
        assert (status, json.loads(text)['service']) == (200, 'data')
        assert await _get(readiness, '/admin') == (404, 'paths: /metrics, /livez, /readyz, /version')
        assert await _get(readiness, '/livez', method='POST') == (405, 'send GET or HEAD')
        assert await _get(readiness, '/livez', method='HEAD') == (200, '')


async def test_slow_connections_leave_the_admin_port_responsive() -> None:
    """Clients that never complete a request do not block probes, because a new connection closes the oldest one."""
    with serving_admin(FREE, service='data') as readiness:
        host, _, port = readiness.address.rpartition(':')
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        for _ in range(2):
            assert await _get(readiness, '/livez') == (200, 'ok')
        for reader, writer in slow[:8]:
            assert await asyncio.wait_for(reader.read(), 10) == b''
            writer.close()
        reader, writer = slow[-1]
        writer.write(b'GET /livez HTTP/1.1\r\n\r\n')
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b'\r\n\r\nok\n')
        for _, writer in slow[8:]:
            writer.close()


async def test_responses_do_not_contain_the_version_of_python() -> None:
    """No response shows which interpreter runs the service."""
    with serving_admin(FREE, service='data') as readiness:
        async with httpx.AsyncClient(base_url=f'http://{readiness.address}') as client:
            for path in ('/livez', '/metrics', '/missing'):
                assert (await client.get(path)).headers.get_list('server') == ['twinkle']


async def test_admin_port_works_with_mutual_tls(tmp_path: Path) -> None:
    """Probes without a certificate work at the admin port of a service that requires certificates from callers."""
    folder = make_authority(tmp_path)
    config = DataConfig(internal_token='secret', tls=tls_of(folder, 'data'))
    with serving_admin(FREE, service='data') as readiness:
        async with opened_ports(config, readiness) as ports:
            server = RpcServer(config, authenticator=InternalAuthenticator('secret'), endpoints=[])
            server.use_ports(ports)
            await server.start()
            assert await _get(readiness, '/readyz') == (200, 'ok')
            with pytest.raises(grpc.aio.AioRpcError):
                await _health(server.address)
            await server.stop(timedelta())


@pytest.mark.parametrize(
    ('setting', 'fields'),
    [('admin_listen', {}), ('telemetry.metrics_port', {'telemetry': {'metrics_port': 1}})],
)
def test_address_in_use_stops_the_program(setting: str, fields: dict[str, dict[str, int]]) -> None:
    """If the admin port is in use, the program stops with a message that names the setting."""
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        if fields:
            config = DataConfig.model_validate({'telemetry': {'metrics_port': port}})
        else:
            config = DataConfig(admin_listen=f'127.0.0.1:{port}')
        with (
            pytest.raises(SystemExit, match=f'^data: {setting}: cannot serve on 127.0.0.1:{port}'),
            serving_admin(config.admin_address(), service='data'),
        ):
            pass


@pytest.mark.parametrize('address', ['nonsense', '127.0.0.1:port', ':7', '127.0.0.1:65536'])
def test_malformed_admin_address_is_refused(address: str) -> None:
    """The configuration refuses a malformed address, and the error names the setting."""
    with pytest.raises(ValidationError, match=r'admin_listen\n.*must be host:port') as caught:
        DataConfig(admin_listen=address)
    assert caught.value.errors()[0]['loc'] == ('admin_listen',)


def test_two_settings_of_the_admin_port_are_refused() -> None:
    """The configuration accepts either `admin_listen` or `telemetry.metrics_port`."""
    with pytest.raises(ValidationError, match=r'telemetry\.metrics_port: leave it out'):
        DataConfig.model_validate({'admin_listen': '127.0.0.1:0', 'telemetry': {'metrics_port': 9101}})


async def test_process_opens_the_admin_port_before_it_loads_the_model(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """A sampler logs the admin port first, then the model and its size, and then the duration of loading."""
    settings = {
        'state_dir': tmp_path,
        'base_model': tiny_llama_dir,
        'checkpoint_address': '127.0.0.1:1',
        'engine': 'torch',
        'admin_listen': '127.0.0.1:0',
        'telemetry.is_log_json': 'true',
    }
    words = [word for name, value in settings.items() for word in ('--set', f'{name}={value}')]
    process = await asyncio.create_subprocess_exec(
        sys.executable, '-m', 'twinkle_services.sampler', *words, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    lines: list[dict[str, object]] = []
    try:
        while not lines or lines[-1]['event'] != 'serving':
            line = await process.stderr.readline()
            assert line, 'the sampler exited'
            lines += [json.loads(line)] if line.startswith(b'{') else []
        readiness = Readiness()
        readiness.address = str(lines[0]['address'])
        assert await _get(readiness, '/readyz') == (200, 'ok')
    finally:
        process.terminate()
        await process.communicate()
    events = [(line['event'], line.get('step')) for line in lines]
    assert events[0] == ('admin port opened', None)
    begin, end = (events.index((event, 'load the model')) for event in ('start step', 'start step finished'))
    assert lines[begin]['base_model'] == str(tiny_llama_dir)
    assert lines[begin]['weight_bytes'] == weight_bytes(tiny_llama_dir)
    assert float(str(lines[end]['seconds'])) > 0
