"""Tests gRPC-Web calls through the console to a real gateway: unary calls, streams, errors, deadlines, cancellation."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fixtures.console_client import ConsoleClient, console_client
from fixtures.gateway_upstream import Upstream, adapter_event
from fixtures.running_gateway import RunningGateway, running_gateway
from twinkle.api.gateway.v1 import catalogue_service_pb2, fleet_service_pb2, metric_service_pb2
from twinkle.api.model.v1 import adapter_service_pb2

LIST_RUNS = 'twinkle.api.gateway.v1.CatalogueService/ListRuns'
GET_METRICS = 'twinkle.api.gateway.v1.MetricService/GetMetrics'
LOG_METRICS = 'twinkle.api.gateway.v1.MetricService/LogMetrics'
GET_ADAPTER = 'twinkle.api.model.v1.AdapterService/GetAdapter'
SAMPLE = 'twinkle.api.sampler.v1.SamplerService/Sample'
TRAIN = 'twinkle.api.model.v1.TrainingService/Train'
WATCH_FLEET = 'twinkle.api.gateway.v1.FleetService/WatchFleet'
SERVER_INFO = 'twinkle.api.server.v1.ServerService/GetServerInfo'


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
    """Headers of the browser other than the request id, the trace and the deadline do not reach a service."""
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
    assert upstream.adapters.remaining_seconds <= 30


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
    """A call that exceeds `grpc-timeout` fails with DEADLINE_EXCEEDED, and is cancelled at the service."""
    result = await client.call(
        GET_ADAPTER, adapter_service_pb2.GetAdapterRequest(adapter_id='slow'), grpc_timeout='100m'
    )
    assert (result.code, result.reason) == (4, 'DEADLINE_PASSED')
    await asyncio.wait_for(upstream.adapters.was_cancelled.wait(), 30)


async def test_closed_browser_cancels_a_unary_call(gateway: RunningGateway, upstream: Upstream) -> None:
    """A browser that closes its connection while it waits for a response cancels the call at the service."""
    async with console_client(gateway) as browser:
        await browser.log_in()
        request = adapter_service_pb2.GetAdapterRequest(adapter_id='slow')
        waiting = asyncio.ensure_future(browser.call(GET_ADAPTER, request))
        await asyncio.wait_for(upstream.adapters.is_waiting.wait(), 30)
        waiting.cancel()
        await asyncio.wait([waiting])
    await asyncio.wait_for(upstream.adapters.was_cancelled.wait(), 30)


async def test_watch_sends_messages_while_the_stream_is_open(client: ConsoleClient) -> None:
    """Messages of a stream arrive one by one, before the stream ends."""
    async with client.stream(WATCH_FLEET, fleet_service_pb2.WatchFleetRequest()) as frames:
        async for item in frames:
            assert item[0] == 0
            if fleet_service_pb2.WatchFleetResponse.FromString(item[5:]).is_synced:
                break
