"""Tests of the RPC server over real sockets: errors, identity, limits, unimplemented methods and draining."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from fixtures.byte_proxy import ByteProxy
from twinkle.api.data.v1 import dataset_service_pb2, dataset_service_pb2_grpc
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc
from twinkle_client.errors import RetryableError, error_from_rpc
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.config import LimitsConfig, ServiceConfig
from twinkle_services.kit.errors import InvalidField, QueueFull, ServiceUnreachable, UnknownComponent
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.channel import call_errors, open_channel
from twinkle_services.kit.rpc.context import acting_for, current_caller
from twinkle_services.kit.rpc.interceptor import MAX_OPEN_STREAMS
from twinkle_services.kit.rpc.layers import server_layers
from twinkle_services.kit.rpc.server import Endpoint, RpcServer, serve_until_stopped
from twinkle_services.kit.rpc.status import ForwardedError, error_from_call

TOKEN = 'test-token'
ALICE = Caller(tenant_id='alice')


class KitConfig(ServiceConfig):
    """Configuration of a service for these tests."""

    service = 'data'


class Servicer(dataset_service_pb2_grpc.DatasetServiceServicer):
    """A servicer that responds as each test requires."""

    def __init__(self) -> None:
        self.was_cancelled = asyncio.Event()
        self.release = asyncio.Event()
        self.has_started = asyncio.Event()

    async def GetDataset(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Fail in the way that the dataset id selects, or return the tenant."""
        if request.dataset_id == 'bad':
            raise InvalidField('dataset_id', 'must be valid')
        if request.dataset_id == 'full':
            raise QueueFull(queue_length=3, queue_limit=3)
        if request.dataset_id == 'long':
            raise UnknownComponent('dataset_id', kind='dataset', name='\u20ac' * 100_000)
        if request.dataset_id == 'broken':
            raise RuntimeError('/secret/path')
        if request.dataset_id == 'group':
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fail())
        if request.dataset_id == 'slow':
            self.has_started.set()
            await self.release.wait()
        response = dataset_service_pb2.GetDatasetResponse()
        response.dataset.dataset_id = current_caller().tenant_id
        return response

    async def _fail(self) -> None:
        raise InvalidField('inner', 'is wrong')

    async def ExportDataset(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Stream without end and record a cancellation."""
        try:
            while True:
                yield dataset_service_pb2.ExportDatasetResponse()
                await asyncio.sleep(0)
        finally:
            self.was_cancelled.set()

    async def Upload(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        """Return the number of received bytes."""
        size = 0
        async for request in request_iterator:
            size += len(request.chunk.data)
        return dataset_service_pb2.UploadResponse(committed_bytes=size)


@asynccontextmanager
async def _serving(**limits: int) -> AsyncIterator[tuple[Servicer, RpcServer, grpc.aio.Channel]]:
    config = KitConfig(internal_token=TOKEN, limits=LimitsConfig(**limits))
    servicer = Servicer()
    endpoint = Endpoint(
        dataset_service_pb2.DESCRIPTOR.services_by_name['DatasetService'],
        servicer,
        dataset_service_pb2_grpc.add_DatasetServiceServicer_to_server,
    )
    server = RpcServer(config, authenticator=InternalAuthenticator(TOKEN), endpoints=[endpoint])
    await server.start()
    channel = open_channel(server.address, internal_token=TOKEN)
    try:
        yield servicer, server, channel
    finally:
        await channel.close()
        await server.stop(timedelta())


async def _get(channel: grpc.aio.Channel, dataset_id: str) -> Any:
    stub = dataset_service_pb2_grpc.DatasetServiceStub(channel)
    return await stub.GetDataset(dataset_service_pb2.GetDatasetRequest(dataset_id=dataset_id))


async def _failure(channel: grpc.aio.Channel, dataset_id: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _get(channel, dataset_id)
    return caught.value


async def test_tenant_comes_from_identity_of_the_calling_service() -> None:
    """A call that a service makes on behalf of a tenant is served for this tenant."""
    async with _serving() as (_, _, channel):
        with acting_for(ALICE):
            assert (await _get(channel, 'x')).dataset.dataset_id == 'alice'


async def test_domain_error_becomes_status_with_details() -> None:
    """Code, reason and field of an error survive the conversion to a status and back."""
    async with _serving() as (_, _, channel):
        bad = await _failure(channel, 'bad')
        assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = error_from_call(bad, service='data')
        assert (error.reason, error.violations[0].field) == ('INVALID_FIELD', 'dataset_id')
        details = rpc_status.from_call(bad).details
        assert [detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR) for detail in details] == [True, False]


async def test_error_inside_a_task_group_is_unwrapped() -> None:
    """The caller receives the error that a task of a group raised."""
    async with _serving() as (_, _, channel):
        with pytest.raises(ForwardedError, match='inner'), call_errors('data'):
            await _get(channel, 'group')


async def test_call_over_a_closed_channel_finds_no_service() -> None:
    """The error of a closed channel is converted like that of a lost connection."""
    async with _serving() as (_, _, channel):
        await channel.close()
        with pytest.raises(ServiceUnreachable), call_errors('data'):
            await _get(channel, 'x')


async def test_unexpected_error_reveals_only_the_request_id() -> None:
    """The message and the paths of an unknown exception do not reach the caller."""
    async with _serving() as (_, _, channel):
        broken = await _failure(channel, 'broken')
        assert broken.code() is grpc.StatusCode.INTERNAL
        assert 'secret' not in str(broken.details())
        error = error_from_call(broken, service='data')
        request_id = dict(broken.trailing_metadata())['x-request-id']
        assert error.metadata()['requestId'] == request_id


@pytest.mark.parametrize('token', ['', 'wrong'])
async def test_call_without_a_valid_token_is_refused(token: str) -> None:
    """Calls with a missing or wrong token fail with UNAUTHENTICATED."""
    async with _serving() as (_, server, _), open_channel(server.address, internal_token=token) as channel:
        with acting_for(ALICE):
            assert (await _failure(channel, 'x')).code() is grpc.StatusCode.UNAUTHENTICATED


async def test_missing_method_is_unimplemented_and_listed() -> None:
    """A method that the servicer does not implement returns UNIMPLEMENTED and is listed as unsupported."""
    async with _serving() as (_, _, channel):
        stub = dataset_service_pb2_grpc.DatasetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListDatasets(dataset_service_pb2.ListDatasetsRequest())
        assert error_from_call(caught.value, service='data').reason == 'NOT_BUILT_YET'
        info = await server_service_pb2_grpc.ServerServiceStub(channel).GetServerInfo(
            server_service_pb2.GetServerInfoRequest()
        )
        methods = {item.method: item.is_supported for item in info.services[0].methods}
        assert methods['twinkle.api.data.v1.DatasetService/GetDataset']
        assert not methods['twinkle.api.data.v1.DatasetService/ListDatasets']


async def test_unknown_method_is_unimplemented_with_reason() -> None:
    """A method outside the contract fails with the reason NOT_BUILT_YET."""
    async with _serving() as (_, _, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary('/twinkle.api.data.v1.Nothing/Here')(b'')
        assert error_from_call(caught.value, service='data').reason == 'NOT_BUILT_YET'


@pytest.mark.parametrize('call_kind', ['unary', 'stream'])
async def test_oversize_message_names_size_and_limit(call_kind: str) -> None:
    """A message above the limit is refused, and the error contains the limit."""
    async with _serving(message_bytes=2048) as (_, _, channel):
        stub = dataset_service_pb2_grpc.DatasetServiceStub(channel)
        big = dataset_service_pb2.UploadRequest()
        big.chunk.data = bytes(4000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (stub.Upload(iter([big])) if call_kind == 'stream' else _get(channel, 'x' * 4000))
        error = error_from_call(caught.value, service='data')
        assert (error.reason, error.metadata()['limitBytes']) == ('MESSAGE_TOO_LARGE', '2048')


@pytest.mark.parametrize('method', ['GetDataset', 'Upload', 'ExportDataset'])
async def test_invalid_bytes_are_refused_as_an_invalid_field(method: str) -> None:
    """Bytes that cannot be parsed lead to INVALID_FIELD without a message of the library."""
    async with _serving() as (_, _, channel):
        path = f'/twinkle.api.data.v1.DatasetService/{method}'
        openers = {'GetDataset': channel.unary_unary, 'Upload': channel.stream_unary}
        open_call: Any = openers.get(method, channel.unary_stream)
        call = open_call(path)(iter([b'\xff']) if method == 'Upload' else b'\xff')
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if method == 'ExportDataset' else call)
        error = error_from_call(caught.value, service='data')
        assert (error.reason, error.violations[0].field) == ('INVALID_FIELD', 'request')


async def test_error_with_a_long_text_is_truncated() -> None:
    """An error that quotes a long text is truncated to the size limit of the metadata."""
    async with _serving() as (_, _, channel):
        error = error_from_call(await _failure(channel, 'long'), service='data')
        assert error.reason == 'UNKNOWN_COMPONENT'
        assert error.metadata()['name'].endswith('...')


@pytest.mark.parametrize('listen', ['nonsense', '127.0.0.1:port', 'taken'])
async def test_unusable_address_stops_the_program(listen: str) -> None:
    """An address that cannot be used stops the program with a message that names the setting."""
    async with _serving() as (_, running, _):
        config = KitConfig(internal_token=TOKEN, listen=running.address if listen == 'taken' else listen)
        server = RpcServer(config, authenticator=InternalAuthenticator(TOKEN), endpoints=[])
        with pytest.raises(SystemExit, match='listen: cannot serve on'):
            await serve_until_stopped(server, config)


async def test_cancelled_stream_closes_its_generator() -> None:
    """The cleanup of a servicer runs as soon as the client cancels the call."""
    async with _serving() as (servicer, _, channel):
        stub = dataset_service_pb2_grpc.DatasetServiceStub(channel)
        call = stub.ExportDataset(dataset_service_pb2.ExportDatasetRequest())
        await call.read()
        call.cancel()
        await asyncio.wait_for(servicer.was_cancelled.wait(), 5)


@pytest.mark.parametrize('end', ['cancelled', 'cut', 'stopped'])
async def test_stream_that_ends_early_logs_no_error(end: str, caplog: pytest.LogCaptureFixture) -> None:
    """A stream that is cancelled, interrupted or stopped by the server is logged as CANCELLED, without an error."""
    with structlog.testing.capture_logs() as entries:
        async with _serving() as (servicer, server, _), _cut_channel(server) as (proxy, channel):
            stub = dataset_service_pb2_grpc.DatasetServiceStub(channel)
            call = stub.ExportDataset(dataset_service_pb2.ExportDatasetRequest())
            await call.read()
            match end:
                case 'cancelled':
                    call.cancel()
                case 'cut':
                    proxy.cut()
                case _:
                    await server.stop(timedelta())
            await asyncio.wait_for(servicer.was_cancelled.wait(), 5)
    assert [entry['status'] for entry in entries if entry['event'] == 'call'] == ['CANCELLED']
    assert [entry for entry in entries if entry['log_level'] == 'error' or 'exc_info' in entry] == []
    # If clients of other tests use more event loops, gRPC logs that its poller found no event.
    failed = [record.getMessage() for record in caplog.records if record.exc_info]
    assert [message for message in failed if 'PollerCompletionQueue' not in message] == []


@asynccontextmanager
async def _cut_channel(server: RpcServer) -> AsyncIterator[tuple[ByteProxy, grpc.aio.Channel]]:
    """Provide a channel to the server, and the proxy that can interrupt it."""
    proxy = ByteProxy(server.ports[0], is_counting_responses=True)
    address = await proxy.start()
    try:
        async with open_channel(address, internal_token=TOKEN) as channel:
            yield proxy, channel
    finally:
        await proxy.stop()


async def test_stop_completes_running_calls_and_refuses_new_ones() -> None:
    """A draining server completes running calls and refuses new calls."""
    async with _serving() as (servicer, server, channel):
        running = asyncio.ensure_future(_get(channel, 'slow'))
        await asyncio.wait_for(servicer.has_started.wait(), 5)
        stopping = asyncio.ensure_future(server.stop(timedelta(seconds=5)))
        servicer.release.set()
        assert (await running) is not None
        await stopping
        assert (await _failure(channel, 'x')).code() is grpc.StatusCode.UNAVAILABLE


async def test_calls_that_a_stopping_server_cancels_can_be_repeated() -> None:
    """Calls that a stopping server ends fail like calls on a lost connection, even if their status is CANCELLED."""
    codes = set[grpc.StatusCode]()
    while grpc.StatusCode.CANCELLED not in codes:
        async with _serving() as (servicer, server, channel):
            calls = [asyncio.ensure_future(_failure(channel, 'slow')) for _ in range(12)]
            await asyncio.wait_for(servicer.has_started.wait(), 5)
            await server.stop(timedelta())
            for failure in await asyncio.gather(*calls):
                codes.add(failure.code())
                assert isinstance(error_from_call(failure, service='data'), ServiceUnreachable)
                assert isinstance(error_from_rpc(failure), RetryableError)
    assert codes <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}


async def test_health_needs_no_credentials() -> None:
    """Load balancers can query the health service without credentials."""
    async with _serving() as (_, server, _), grpc.aio.insecure_channel(server.address) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=''))
        assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_describes_the_services_without_credentials() -> None:
    """Programs without generated code can list the services and read the file of a service."""
    async with _serving() as (_, server, _), grpc.aio.insecure_channel(server.address) as channel:
        stream: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await stream.write(reflection_pb2.ServerReflectionRequest(list_services=''))
        names = {service.name for service in (await stream.read()).list_services_response.service}
        assert {'twinkle.api.data.v1.DatasetService', 'grpc.health.v1.Health'} <= names
        await stream.write(
            reflection_pb2.ServerReflectionRequest(file_containing_symbol='twinkle.api.data.v1.DatasetService')
        )
        assert (await stream.read()).file_descriptor_response.file_descriptor_proto
        stream.cancel()


@pytest.mark.parametrize('full', ['reflection', 'health'])
async def test_public_services_have_separate_limits(full: str) -> None:
    """Streams of reflection do not prevent a health probe, and streams of health do not prevent reflection."""
    async with _serving() as (_, server, _), grpc.aio.insecure_channel(server.address) as unknown:

        async def watch() -> Any:
            return health_pb2_grpc.HealthStub(unknown).Watch(health_pb2.HealthCheckRequest(service='x'))

        async def reflect() -> Any:
            stream: Any = reflection_pb2_grpc.ServerReflectionStub(unknown).ServerReflectionInfo()
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await stream.write(reflection_pb2.ServerReflectionRequest(list_services=''))
            return stream

        first, second = (reflect, watch) if full == 'reflection' else (watch, reflect)
        streams = [await first() for _ in range(MAX_OPEN_STREAMS)]
        for stream in streams:
            await stream.read()
        assert await (await first()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        streams.append(await second())
        assert await streams[-1].read() is not grpc.aio.EOF
        for stream in streams:
            stream.cancel()


async def test_streams_without_credentials_are_limited() -> None:
    """Streams without credentials have a separate limit; when a stream is closed, a new stream is accepted."""
    async with _serving() as (_, server, channel), grpc.aio.insecure_channel(server.address) as unknown:

        def watch() -> Any:
            return health_pb2_grpc.HealthStub(unknown).Watch(health_pb2.HealthCheckRequest(service='x'))

        streams = [watch() for _ in range(MAX_OPEN_STREAMS)]
        for stream in streams:
            await stream.read()
        refused = watch()
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await _get(channel, 'x')) is not None
        for stream in streams:
            stream.cancel()
        while await (stream := watch()).read() is grpc.aio.EOF:
            assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stream.cancel()


def test_layers_have_the_documented_order() -> None:
    """The layers that trace, count, log and map errors precede the layers that refuse calls."""
    layers = server_layers(InternalAuthenticator(TOKEN), is_supported=bool, default_timeouts={}, message_limit_bytes=1)
    assert [layer.__name__ for layer in layers] == [
        'trace_call',
        'count_call',
        'log_call',
        'map_errors',
        'trust',
        'authenticate',
        'name_request',
        'share',
        'refuse_unbuilt_method',
        'bound',
    ]


def test_address_outside_loopback_needs_a_token(tmp_path: Path) -> None:
    """A service without an internal token refuses to listen on addresses other than loopback."""
    config = KitConfig(listen='0.0.0.0:0', state_dir=tmp_path)
    with pytest.raises(ValueError, match='internal_token'):
        RpcServer(config, authenticator=InternalAuthenticator(''), endpoints=[])
