"""Tests of gRPC-Web calls through the console: unary calls, streams, errors, deadlines and cancellation."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from fixtures.console_client import ConsoleClient, console_client, frame, parse_frames
from fixtures.gateway_upstream import Upstream, adapter_event
from fixtures.running_gateway import ADMIN_KEY, RunningGateway, running_gateway
from twinkle.api.gateway.v1 import catalogue_service_pb2, fleet_service_pb2, metric_service_pb2
from twinkle.api.model.v1 import adapter_service_pb2, training_service_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2
from twinkle_services.gateway.__main__ import assembled
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.kit.clock import FakeClock

LIST_RUNS = 'twinkle.api.gateway.v1.CatalogueService/ListRuns'
GET_METRICS = 'twinkle.api.gateway.v1.MetricService/GetMetrics'
LOG_METRICS = 'twinkle.api.gateway.v1.MetricService/LogMetrics'
GET_ADAPTER = 'twinkle.api.model.v1.AdapterService/GetAdapter'
SAMPLE = 'twinkle.api.sampler.v1.SamplerService/Sample'
TRAIN = 'twinkle.api.model.v1.TrainingService/Train'
WATCH_FLEET = 'twinkle.api.gateway.v1.FleetService/WatchFleet'


@pytest.fixture
async def gateway(upstream: Upstream, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway with HTTP, in front of `upstream`, with one run of the default tenant."""
    upstream.adapters.watch.snapshot = [adapter_event('ad-1')]
    async with running_gateway(tmp_path, upstream=upstream.address, http_listen='127.0.0.1:0') as running:
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[ConsoleClient]:
    """A browser that is logged in with a key of the default tenant."""
    async with console_client(gateway) as browser:
        await browser.log_in()
        yield browser


async def runs_of(client: ConsoleClient) -> list[str]:
    """Return the ids of the runs that a browser lists."""
    result = await client.call(LIST_RUNS, catalogue_service_pb2.ListRunsRequest())
    assert result.code == 0
    (message,) = result.messages
    return [run.run_id for run in catalogue_service_pb2.ListRunsResponse.FromString(message).runs]


async def test_runs_and_metrics_are_read_with_the_cookie(client: ConsoleClient) -> None:
    """A logged-in browser lists its tenant's runs, logs values and reads them."""
    while await runs_of(client) != ['ad-1']:
        pass
    points = [metric_service_pb2.MetricPoint(name='loss', step=3, value=2.5)]
    logged = await client.call(LOG_METRICS, metric_service_pb2.LogMetricsRequest(run_id='ad-1', points=points))
    assert (logged.code, len(logged.messages)) == (0, 1)
    result = await client.call(GET_METRICS, metric_service_pb2.GetMetricsRequest(run_id='ad-1'))
    (series,) = metric_service_pb2.GetMetricsResponse.FromString(result.messages[0]).series
    assert (series.name, list(series.steps), list(series.values)) == ('loss', [3], [2.5])
    assert result.trailers['x-request-id']


async def test_forwarded_call_has_only_the_identity_of_the_key(client: ConsoleClient, upstream: Upstream) -> None:
    """Only the request id, the trace and the deadline in the browser's headers reach a service."""
    session = (await client.http.get('/console/api/session')).json()
    trace = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'
    result = await client.call(
        GET_ADAPTER,
        adapter_service_pb2.GetAdapterRequest(adapter_id='ad-1'),
        x_request_id='my-request',
        traceparent=trace,
        grpc_timeout='30S',
        **{
            'x-twinkle-tenant': 'alice',
            'x-twinkle-internal': '1',
            'x-twinkle-scopes': 'admin',
            'x-twinkle-key': 'key-of-alice',
            'baggage': 'a=b',
            'tracestate': 'a=b',
        },
    )
    assert result.code == 0, result.text
    seen = adapter_service_pb2.GetAdapterResponse.FromString(result.messages[0]).adapter.user_metadata
    assert (seen['tenant'], seen['is_internal'], seen['request_id']) == ('default', 'False', 'my-request')
    assert seen['x-twinkle-key'] == session['key_id']
    assert seen['x-twinkle-scopes'] != 'admin'
    assert not {'x-twinkle-internal', 'baggage', 'tracestate', 'cookie'} & set(seen)
    assert upstream.adapters.remaining_seconds is not None
    assert upstream.adapters.remaining_seconds <= 31


@pytest.mark.parametrize(
    ('adapter_id', 'code', 'reason'),
    [('missing', 5, 'ADAPTER_NOT_FOUND'), ('invalid', 3, 'INVALID_FIELD'), ('full', 8, 'QUEUE_FULL')],
)
async def test_status_of_a_service_is_returned(client: ConsoleClient, adapter_id: str, code: int, reason: str) -> None:
    """The status of a service, with its details and a request id, is the last frame."""
    result = await client.call(GET_ADAPTER, adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id))
    assert (result.code, result.reason, result.messages) == (code, reason, [])
    assert result.trailers['x-request-id'].startswith('rq')


async def test_deadline_of_the_browser_ends_the_call(client: ConsoleClient, upstream: Upstream) -> None:
    """A call that exceeds `grpc-timeout` fails with DEADLINE_EXCEEDED and is cancelled on the service."""
    result = await client.call(
        GET_ADAPTER, adapter_service_pb2.GetAdapterRequest(adapter_id='slow'), grpc_timeout='100m'
    )
    assert (result.code, result.reason) == (4, 'DEADLINE_PASSED')
    await asyncio.wait_for(upstream.adapters.was_cancelled.wait(), 30)


async def test_closed_browser_cancels_a_unary_call(gateway: RunningGateway, upstream: Upstream) -> None:
    """If a browser closes its connection while it waits for a response, the call to the service is cancelled."""
    async with console_client(gateway) as browser:
        await browser.log_in()
        request = adapter_service_pb2.GetAdapterRequest(adapter_id='slow')
        waiting = asyncio.ensure_future(browser.call(GET_ADAPTER, request))
        await asyncio.wait_for(upstream.adapters.is_waiting.wait(), 30)
        waiting.cancel()
        await asyncio.wait([waiting])
    await asyncio.wait_for(upstream.adapters.was_cancelled.wait(), 30)


async def test_watch_sends_messages_while_the_stream_is_open(client: ConsoleClient) -> None:
    """Messages of a stream arrive one at a time, before the stream ends."""
    async with client.stream(WATCH_FLEET, fleet_service_pb2.WatchFleetRequest()) as frames:
        async for item in frames:
            assert item[0] == 0
            if fleet_service_pb2.WatchFleetResponse.FromString(item[5:]).is_synced:
                break


async def test_closed_browser_cancels_a_stream(gateway: RunningGateway, upstream: Upstream) -> None:
    """If a browser closes a stream, the call to the service is cancelled."""
    async with console_client(gateway) as browser:
        await browser.log_in()
        async with browser.stream(SAMPLE, sampler_service_pb2.SampleRequest()) as frames:
            response = sampler_service_pb2.SampleResponse.FromString((await anext(frames))[5:])
            assert len(response.delta.text) == 1 << 18
            assert not upstream.sampler.was_cancelled.is_set()
        await asyncio.wait_for(upstream.sampler.was_cancelled.wait(), 30)


async def test_slow_browser_delays_the_service(client: ConsoleClient, upstream: Upstream) -> None:
    """Messages in flight to a browser that does not read are limited, and the stream can continue later."""
    async with client.stream(SAMPLE, sampler_service_pb2.SampleRequest()) as frames:
        await anext(frames)
        seen = -1
        while seen != upstream.sampler.sent_count:
            seen = upstream.sampler.sent_count
            # The stream is blocked if many other calls complete without another message.
            for _ in range(50):
                await client.call(GET_ADAPTER, adapter_service_pb2.GetAdapterRequest(adapter_id='a'))
        assert seen * (1 << 18) < 64 << 20
        for _ in range(seen + 20):
            await anext(frames)
        assert upstream.sampler.sent_count > seen


async def test_draining_gateway_ends_a_stream_with_its_status(gateway: RunningGateway, client: ConsoleClient) -> None:
    """A stopping gateway ends an open stream with trailers whose status allows a retry."""
    assert gateway.http is not None
    async with client.stream(WATCH_FLEET, fleet_service_pb2.WatchFleetRequest()) as frames:
        last = await anext(frames)
        stopping = asyncio.create_task(gateway.http.stop(timedelta()))
        async for item in frames:
            last = item
        await stopping
    result = parse_frames(last)
    assert (result.code, result.reason) == (14, 'DRAINING')


async def test_blocked_browser_gets_no_trailers_inside_a_message(
    gateway: RunningGateway, client: ConsoleClient, upstream: Upstream
) -> None:
    """If the gateway stops while it sends a message, the connection ends without a status inside the message."""
    assert gateway.http is not None
    secret = (await gateway.make_key('alice')).secret
    host, _, port = gateway.http_address.rpartition(':')
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(
        f'POST /console/rpc/{SAMPLE} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n'
        'content-type: application/grpc-web+proto\r\ncontent-length: 5\r\n\r\n'.encode()
        + bytes(5)
    )
    assert (await reader.readline()).startswith(b'HTTP/1.1 200')
    seen = -1
    while seen != upstream.sampler.sent_count:
        seen = upstream.sampler.sent_count
        for _ in range(50):
            await client.call(GET_ADAPTER, adapter_service_pb2.GetAdapterRequest(adapter_id='a'))
    await gateway.http.stop(timedelta())
    rest = b''
    while part := await reader.read(1 << 16):
        rest = (rest + part)[-100:]
    writer.close()
    assert rest.endswith(b'x\r\n')


@pytest.mark.parametrize('method', [TRAIN, 'twinkle.api.model.v1.TrainingService/UploadBatch'])
async def test_stream_of_requests_is_unimplemented(client: ConsoleClient, upstream: Upstream, method: str) -> None:
    """A method with a stream of requests is refused before anything is forwarded, and the error names the method."""
    result = await client.call(method, training_service_pb2.TrainRequest())
    assert (result.code, result.reason) == (12, 'NOT_BUILT_YET')
    assert method in result.text
    assert upstream.training.received_count == 0


@pytest.mark.parametrize(
    'method',
    [
        'twinkle.api.gateway.v1.CatalogueService/Nothing',
        'nothing.v1.Service/ListRuns',
        'grpc.health.v1.Health/Check',
        'grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo',
        'twinkle.api.gateway.v1.CatalogueService/ListRuns%00',
    ],
)
async def test_unknown_method_is_unimplemented(client: ConsoleClient, method: str) -> None:
    """Methods outside the contracts, including health and reflection, are refused."""
    result = parse_frames((await client.post(method, frame(b''))).content)
    assert (result.code, result.reason) == (12, 'NOT_BUILT_YET')


@pytest.mark.parametrize(
    ('body', 'headers', 'field'),
    [
        (b'', {}, 'body'),
        (frame(b'')[:4], {}, 'body'),
        (frame(b'abc')[:-1], {}, 'body'),
        (frame(b'') + frame(b''), {}, 'body'),
        (frame(b'', flags=0x80), {}, 'body'),
        (frame(b'', flags=0x01), {}, 'body'),
        (frame(b''), {'grpc_encoding': 'gzip'}, 'grpc-encoding'),
        (frame(b''), {'content_encoding': 'gzip'}, 'content-encoding'),
        (frame(b''), {'grpc_timeout': '5'}, 'grpc-timeout'),
        (frame(b''), {'grpc_timeout': '-5S'}, 'grpc-timeout'),
        (frame(b''), {'grpc_timeout': '123456789S'}, 'grpc-timeout'),
    ],
)
async def test_malformed_request_is_refused(
    client: ConsoleClient, body: bytes, headers: dict[str, str], field: str
) -> None:
    """A request that is not one uncompressed frame is refused before it is forwarded, and the error names the fault."""
    result = parse_frames((await client.post(LIST_RUNS, body, **headers)).content)
    assert (result.code, result.reason, result.facts['field']) == (3, 'INVALID_FIELD', field)


@pytest.mark.parametrize('content_type', ['application/json', 'text/plain', 'application/grpc-web-text', ''])
async def test_other_content_type_is_refused(client: ConsoleClient, content_type: str) -> None:
    """A content type that another site's page could send, or that is not binary gRPC-Web, gets status 415."""
    response = await client.post(LIST_RUNS, frame(b''), content_type=content_type)
    assert (response.status_code, response.json()['error']['field']) == (415, 'content-type')


async def test_request_over_the_limit_is_refused(upstream: Upstream, tmp_path: Path) -> None:
    """A body over the limit of the HTTP APIs is refused with its size."""
    options = {'upstream': upstream.address, 'http_listen': '127.0.0.1:0', 'http_body_bytes': 2048}
    async with running_gateway(tmp_path, **options) as gateway, console_client(gateway) as browser:
        await browser.log_in()
        accepted = adapter_service_pb2.GetAdapterRequest(adapter_id='x' * 2000)
        assert (await browser.call(GET_ADAPTER, accepted)).code == 0
        result = await browser.call(GET_ADAPTER, adapter_service_pb2.GetAdapterRequest(adapter_id='x' * 2100))
        assert (result.code, result.reason) == (8, 'MESSAGE_TOO_LARGE')


async def test_longest_timeout_is_accepted(client: ConsoleClient) -> None:
    """The longest timeout of the protocol does not overflow."""
    result = await client.call(LIST_RUNS, catalogue_service_pb2.ListRunsRequest(), grpc_timeout='99999999H')
    assert result.code == 0


async def test_call_waits_for_the_start_of_the_grpc_server(tmp_path: Path) -> None:
    """A call that arrives after the start of the HTTP server but before the start of the gRPC server succeeds."""
    config = GatewayConfig(state_dir=tmp_path, bootstrap_key=ADMIN_KEY, http_listen='127.0.0.1:0')
    async with assembled(config, clock=FakeClock()) as gateway:
        assert gateway.http is not None
        await gateway.http.start()
        async with httpx.AsyncClient(base_url=f'http://{gateway.http.address}', timeout=60) as http:
            browser = ConsoleClient(http)
            await browser.log_in()
            calling = asyncio.ensure_future(browser.call(LIST_RUNS, catalogue_service_pb2.ListRunsRequest()))
            await asyncio.wait([calling], timeout=0.3)
            assert not calling.done()
            await gateway.server.start()
            assert (await calling).code == 0
        await gateway.http.stop(timedelta())
        await gateway.server.stop(timedelta())
