"""Tests of calls through the gateway: unchanged bytes and errors, flow control, and the identity of the caller."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from fixtures.gateway_upstream import TOKEN, Upstream, raw_echo
from fixtures.running_gateway import ADMIN, MESSAGE_LIMIT, RunningGateway, bearer, failure_of, running_gateway
from twinkle.api.model.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    training_service_pb2,
    training_service_pb2_grpc,
)
from twinkle.api.sampler.v1 import sampler_service_pb2, sampler_service_pb2_grpc
from twinkle_services.gateway.credentials import Access, requirement_of
from twinkle_services.gateway.forwarding.open import FORWARDED
from twinkle_services.kit.rpc.auth import SCOPES_KEY, TENANT_KEY

METHODS = {
    f'/{service.full_name}/{method.name}': (method.client_streaming, method.server_streaming)
    for services in FORWARDED.values()
    for service in services
    for method in service.methods
    if requirement_of(f'{service.full_name}/{method.name}') is not Access.INTERNAL
}


def get_adapter(gateway: RunningGateway, adapter_id: str, **options):
    """Call GetAdapter; the upstream service selects the outcome by the adapter id."""
    stub = adapter_service_pb2_grpc.AdapterServiceStub(gateway.channel)
    return stub.GetAdapter(
        adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id), **{'metadata': ADMIN, **options}
    )


async def first_response(gateway: RunningGateway):
    """Repeat a call until the service is reachable, and return the response."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return await get_adapter(gateway, 'a')


async def test_every_forwarded_method_passes_its_bytes_unchanged(tmp_path: Path) -> None:
    """Bytes that are not a valid message pass unchanged in both directions, for all four kinds of methods."""
    stream_kinds = set()
    async with raw_echo() as address, running_gateway(tmp_path, upstream=address) as gateway:
        for path, (is_client_streaming, is_server_streaming) in METHODS.items():
            stream_kinds.add((is_client_streaming, is_server_streaming))
            count = 5 if is_client_streaming and is_server_streaming else 1
            sent = [os.urandom(size) for size in (200_000, 1, 0, 7, 1000)[:count]]
            call = gateway.channel.stream_stream(path)(iter(sent), metadata=ADMIN)
            assert [message async for message in call] == [message[::-1] for message in sent]
            assert ('x-echo', path) in list(await call.trailing_metadata())
    assert len(stream_kinds) == 4


async def test_client_stream_arrives_completely(gateway: RunningGateway) -> None:
    """The service receives every message of a client stream."""

    async def chunks() -> AsyncIterator[training_service_pb2.UploadBatchRequest]:
        for _ in range(20):
            request = training_service_pb2.UploadBatchRequest()
            request.chunk.data = b'x' * 100_000
            yield request

    stub = training_service_pb2_grpc.TrainingServiceStub(gateway.channel)
    assert (await stub.UploadBatch(chunks(), metadata=ADMIN)).committed_bytes == 2_000_000


async def test_identity_comes_only_from_the_key(gateway: RunningGateway) -> None:
    """Internal metadata that a client sends does not reach any service."""
    key = await gateway.make_key('alice', scopes=(1,))
    forged = (
        (TENANT_KEY, 'bob'),
        (SCOPES_KEY, 'admin'),
        ('x-twinkle-key', 'forged'),
        ('x-twinkle-internal', '1'),
        ('x-twinkle-anything', 'x'),
    )
    response = await get_adapter(gateway, 'a', metadata=(*bearer(key.secret), *forged))
    seen = dict(response.adapter.user_metadata)
    assert seen['tenant'] == 'alice'
    assert seen['scopes'] == 'train'
    assert seen['x-twinkle-key'] == key.key.key_id
    assert seen['is_internal'] == 'False'
    assert 'x-twinkle-anything' not in seen
    assert key.secret not in str(response)


async def test_internal_token_is_not_an_api_key(gateway: RunningGateway) -> None:
    """The internal token of the services is refused as an API key."""
    failure = await failure_of(get_adapter(gateway, 'a', metadata=bearer(TOKEN)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, 'CREDENTIALS_INVALID')


async def test_request_id_and_trace_reach_the_service(gateway: RunningGateway) -> None:
    """The client's request id is forwarded and returned, and its trace id is kept."""
    trace_id = 'ab' * 16
    metadata = (*ADMIN, ('x-request-id', 'my-request'), ('traceparent', f'00-{trace_id}-{"cd" * 8}-01'))
    call = get_adapter(gateway, 'a', metadata=metadata)
    seen = dict((await call).adapter.user_metadata)
    assert seen['request_id'] == 'my-request'
    assert ('x-request-id', 'my-request') in list(await call.trailing_metadata())
    assert seen['traceparent'].split('-')[1] == trace_id


@pytest.mark.parametrize(
    ('adapter_id', 'code', 'reason'),
    [
        ('missing', grpc.StatusCode.NOT_FOUND, 'ADAPTER_NOT_FOUND'),
        ('invalid', grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_FIELD'),
        ('full', grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUEUE_FULL'),
        ('broken', grpc.StatusCode.INTERNAL, 'INTERNAL'),
    ],
)
async def test_error_passes_with_its_details_unchanged(
    gateway: RunningGateway, upstream: Upstream, adapter_id: str, code: grpc.StatusCode, reason: str
) -> None:
    """A call through the gateway fails exactly like a direct call to the service."""
    internal = (*bearer(TOKEN), (TENANT_KEY, 'default'), ('x-request-id', 'same'))
    async with grpc.aio.insecure_channel(upstream.address) as channel:
        stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)
        request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id)
        direct = await failure_of(stub.GetAdapter(request, metadata=internal))
    forwarded = await failure_of(get_adapter(gateway, adapter_id, metadata=(*ADMIN, ('x-request-id', 'same'))))
    assert forwarded == direct
    assert (forwarded.code, forwarded.reason) == (code, reason)


async def test_error_within_a_stream_is_forwarded(gateway: RunningGateway) -> None:
    """The responses of a stream before its error arrive, followed by the error with its details."""

    async def operations() -> AsyncIterator[training_service_pb2.TrainRequest]:
        for number, adapter_id in enumerate(('a', 'a', 'missing'), start=1):
            request = training_service_pb2.TrainRequest()
            request.operation.adapter_id = adapter_id
            request.operation.sequence_number = number
            yield request

    stub = training_service_pb2_grpc.TrainingServiceStub(gateway.channel)
    call = stub.Train(operations(), metadata=ADMIN)
    numbers = [(await call.read()).result.sequence_number for _ in range(2)]
    assert numbers == [1, 2]
    failure = await failure_of(call.read())
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, 'ADAPTER_NOT_FOUND')


async def test_refused_upload_has_the_reason_of_its_service(gateway: RunningGateway) -> None:
    """If the service refuses an upload while the client is still sending, the call fails with the service's reason."""

    async def chunks() -> AsyncIterator[training_service_pb2.UploadBatchRequest]:
        header = training_service_pb2.UploadBatchRequest()
        header.header.upload_id = 'bad'
        yield header
        for _ in range(40):
            request = training_service_pb2.UploadBatchRequest()
            request.chunk.data = b'x' * 500_000
            yield request

    stub = training_service_pb2_grpc.TrainingServiceStub(gateway.channel)
    for _ in range(10):
        failure = await failure_of(stub.UploadBatch(chunks(), metadata=ADMIN))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_FIELD')
    waiting = stub.UploadBatch(metadata=ADMIN)
    header = training_service_pb2.UploadBatchRequest()
    header.header.upload_id = 'bad'
    await waiting.write(header)
    assert (await failure_of(waiting)).reason == 'INVALID_FIELD'


async def test_bidirectional_stream_responds_before_the_client_is_done(gateway: RunningGateway) -> None:
    """Each operation gets its response while the client's side of the stream is still open."""
    stub = training_service_pb2_grpc.TrainingServiceStub(gateway.channel)
    call = stub.Train(metadata=ADMIN)
    for number in (1, 2, 3):
        request = training_service_pb2.TrainRequest()
        request.operation.sequence_number = number
        await call.write(request)
        assert (await call.read()).result.sequence_number == number
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_cancellation_reaches_the_service(gateway: RunningGateway, upstream: Upstream) -> None:
    """A cancelled call is cancelled on the service, for unary, server-streaming and bidirectional calls."""
    call = get_adapter(gateway, 'slow')
    waiting = asyncio.ensure_future(call.wait_for_connection())
    await upstream.adapters.is_waiting.wait()
    call.cancel()
    await upstream.adapters.was_cancelled.wait()
    waiting.cancel()

    sampler = sampler_service_pb2_grpc.SamplerServiceStub(gateway.channel)
    stream = sampler.Sample(sampler_service_pb2.SampleRequest(), metadata=ADMIN)
    await stream.read()
    stream.cancel()
    await upstream.sampler.was_cancelled.wait()

    training = training_service_pb2_grpc.TrainingServiceStub(gateway.channel)
    bidirectional = training.Train(metadata=ADMIN)
    for adapter_id in ('a', 'slow'):
        request = training_service_pb2.TrainRequest()
        request.operation.adapter_id = adapter_id
        await bidirectional.write(request)
    await bidirectional.read()
    bidirectional.cancel()
    await upstream.training.was_cancelled.wait()


async def test_deadline_reaches_the_service(gateway: RunningGateway, upstream: Upstream) -> None:
    """The service receives the client's deadline, and a call that exceeds the deadline is cancelled."""
    await get_adapter(gateway, 'a', timeout=60)
    assert upstream.adapters.remaining_seconds is not None
    # The transport rounds the time up to three digits.
    assert 30 < upstream.adapters.remaining_seconds < 61
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get_adapter(gateway, 'slow', timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await upstream.adapters.was_cancelled.wait()


async def test_slow_reader_blocks_the_writer(gateway: RunningGateway, upstream: Upstream) -> None:
    """The messages in flight to a client that does not read are limited by the transport's windows."""
    sampler = sampler_service_pb2_grpc.SamplerServiceStub(gateway.channel)
    stream = sampler.Sample(sampler_service_pb2.SampleRequest(), metadata=ADMIN)
    await stream.read()
    seen = -1
    while seen != upstream.sampler.sent_count:
        seen = upstream.sampler.sent_count
        # The stream is blocked if many other calls complete without another message.
        for _ in range(50):
            await get_adapter(gateway, 'a')
    assert seen * (1 << 18) < 64 << 20
    for _ in range(seen + 20):
        await stream.read()
    assert upstream.sampler.sent_count > seen
    stream.cancel()


async def test_oversized_message_is_refused_with_its_size(gateway: RunningGateway, upstream: Upstream) -> None:
    """The error for an oversized message contains its size and the limit, and the message is not forwarded."""
    failure = await failure_of(get_adapter(gateway, 'x' * (MESSAGE_LIMIT + 1)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 'MESSAGE_TOO_LARGE')
    assert int(failure.metadata['sizeBytes']) > MESSAGE_LIMIT
    assert int(failure.metadata['limitBytes']) == MESSAGE_LIMIT
    assert upstream.adapters.remaining_seconds is None

    stub = training_service_pb2_grpc.TrainingServiceStub(gateway.channel)
    request = training_service_pb2.TrainRequest()
    request.operation.adapter_id = 'x' * (MESSAGE_LIMIT + 1)
    stream = stub.Train(metadata=ADMIN)
    await stream.write(training_service_pb2.TrainRequest())
    await stream.read()
    await stream.write(request)
    failure = await failure_of(stream.read())
    assert failure.reason == 'MESSAGE_TOO_LARGE'
    assert upstream.training.received_count == 1


async def test_error_of_an_unreachable_service_hides_its_address(tmp_path: Path) -> None:
    """The error for an unreachable service has a retry time and no address; calls succeed after a restart."""
    async with Upstream().serving() as stopped:
        address = stopped.address
    async with running_gateway(tmp_path, upstream=address) as gateway:
        for call in (
            get_adapter(gateway, 'a'),
            training_service_pb2_grpc.TrainingServiceStub(gateway.channel).Train(iter(()), metadata=ADMIN),
        ):
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE')
            assert failure.metadata == {'service': 'model'}
            assert failure.retry_seconds
            assert address not in str(failure)
            assert 'connect' not in str(failure)
        async with Upstream().serving(listen=address):
            assert (await first_response(gateway)).adapter.adapter_id == 'a'


async def test_service_that_is_not_deployed_is_unreachable(tmp_path: Path) -> None:
    """A gateway without services returns SERVICE_UNREACHABLE for every forwarded method."""
    async with running_gateway(tmp_path) as gateway:
        for path in METHODS:
            call = gateway.channel.stream_stream(path)(iter([b'']), metadata=ADMIN)
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE')
