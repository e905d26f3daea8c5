"""Tests that a key's streams and links fail once the key is revoked, replaced or expired."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.gateway_upstream import Upstream
from fixtures.openai_gateway import facts_of, openai_gateway
from fixtures.running_gateway import ADMIN, Failure, RunningGateway, bearer, running_gateway
from fixtures.sampler_service import sample_request
from fixtures.tinker_catalogue import BEST, tinker_catalogue
from twinkle.api.gateway.v1 import fleet_service_pb2, key_service_pb2, key_service_pb2_grpc
from twinkle.api.model.v1 import training_service_pb2, training_service_pb2_grpc
from twinkle.api.sampler.v1 import sampler_service_pb2, sampler_service_pb2_grpc
from twinkle_services.gateway.credentials import Access, requirement_of
from twinkle_services.gateway.forwarding.open import FORWARDED

SHORT = timedelta(milliseconds=200)
"""Interval between two checks of an open stream."""
LONG = timedelta(hours=1)
"""Interval between checks that is longer than a test."""
MAX_TOKENS = 400_000
"""Length in tokens of a sequence that no test reads completely."""
STREAMS = {
    f'/{service.full_name}/{method.name}': method.client_streaming
    for services in FORWARDED.values()
    for service in services
    for method in service.methods
    if (method.client_streaming or method.server_streaming)
    and requirement_of(f'{service.full_name}/{method.name}') is not Access.INTERNAL
}
"""Forwarded methods with a stream, by path. The value states whether the client streams its requests."""
WATCH_FLEET = f'/{fleet_service_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name}/WatchFleet'
Invalidate = Callable[[RunningGateway, Any], Awaitable[None]]


def _keys(gateway: RunningGateway) -> key_service_pb2_grpc.KeyServiceStub:
    return key_service_pb2_grpc.KeyServiceStub(gateway.channel)


async def _revoke(gateway: RunningGateway, created: Any) -> None:
    await _keys(gateway).RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=created.key.key_id), metadata=ADMIN)


async def _replace(gateway: RunningGateway, created: Any) -> None:
    request = key_service_pb2.RotateKeyRequest(key_id=created.key.key_id)
    request.overlap.FromTimedelta(timedelta())
    await _keys(gateway).RotateKey(request, metadata=ADMIN)


async def _expire(gateway: RunningGateway, created: Any) -> None:
    gateway.clock.advance(created.key.expire_time.ToDatetime() - created.key.create_time.ToDatetime())


class SilentServices(grpc.GenericRpcHandler):
    """Services that keep every stream open without a response."""

    def __init__(self) -> None:
        self.started = {path: asyncio.Event() for path in STREAMS}
        self.finished = {path: asyncio.Event() for path in STREAMS}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method with a stream, or None."""
        path: Any = handler_call_details.method
        if path not in STREAMS:
            return None

        async def keep_open(requests: Any, context: Any) -> None:
            del requests, context
            self.started[path].set()
            try:
                await asyncio.Event().wait()
            finally:
                self.finished[path].set()

        return grpc.stream_stream_rpc_method_handler(keep_open)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve until the block exits, and yield the address."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self,))
        port = server.add_insecure_port('127.0.0.1:0')
        await server.start()
        try:
            yield f'127.0.0.1:{port}'
        finally:
            await server.stop(0)


async def _open(gateway: RunningGateway, path: str, secret: str) -> Any:
    """Start a method and send one message; a client stream stays open."""
    call = gateway.channel.stream_stream(path)(metadata=bearer(secret))
    await call.write(b'')
    if not STREAMS.get(path, False):
        await call.done_writing()
    return call


async def _failure_of(call: Any) -> Failure:
    """Read a stream to its end, and return its failure."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return Failure.of(error)
    raise AssertionError('the stream ended without a failure')


@pytest.mark.parametrize('invalidate', [_revoke, _replace, _expire])
async def test_idle_streams_fail_when_their_key_becomes_invalid(tmp_path: Path, invalidate: Invalidate) -> None:
    """Every idle stream fails like a call with an unknown key, and the gateway cancels its call to the service."""
    services = SilentServices()
    assert len(STREAMS) > 7
    async with (
        services.serving() as address,
        running_gateway(tmp_path, upstream=address, key_memory=SHORT) as gateway,
    ):
        ended_key, valid_key = (
            await gateway.make_key('alice', ttl=timedelta(minutes=1)),
            await gateway.make_key('alice'),
        )
        calls = {path: await _open(gateway, path, ended_key.secret) for path in STREAMS}
        calls[WATCH_FLEET] = await _open(gateway, WATCH_FLEET, ended_key.secret)
        await calls[WATCH_FLEET].read()
        other = await _open(gateway, WATCH_FLEET, valid_key.secret)
        for started in services.started.values():
            await started.wait()
        await invalidate(gateway, ended_key)
        for path, call in calls.items():
            failure = await _failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, 'CREDENTIALS_INVALID'), path
        for finished in services.finished.values():
            await finished.wait()
        assert not other.done()


@pytest.mark.parametrize('invalidate', [_revoke, _replace, _expire])
async def test_message_with_a_key_that_became_invalid_is_refused(
    upstream: Upstream, tmp_path: Path, invalidate: Invalidate
) -> None:
    """The first operation on an open `Train` stream after its key becomes invalid is refused and not forwarded."""
    async with running_gateway(tmp_path, upstream=upstream.address, key_memory=LONG) as gateway:
        created = await gateway.make_key('alice', ttl=timedelta(minutes=1))
        train = training_service_pb2_grpc.TrainingServiceStub(gateway.channel).Train(metadata=bearer(created.secret))
        request = training_service_pb2.TrainRequest()
        request.operation.adapter_id, request.operation.sequence_number = 'a', 1
        await train.write(request)
        assert (await train.read()).result.sequence_number == 1
        await invalidate(gateway, created)
        await train.write(request)
        assert (await _failure_of(train)).reason == 'CREDENTIALS_INVALID'
        assert upstream.training.received_count == 1


async def test_busy_streams_fail_after_their_key_is_revoked(tmp_path: Path) -> None:
    """`Sample`, `SampleBatch` and `WatchLoad` streams that send continuously fail after their key is revoked."""
    engine = FakeSamplerEngine(context_tokens=2 * MAX_TOKENS, max_sequences=4)
    async with openai_gateway(tmp_path, engine, key_memory=SHORT) as running:
        created = await running.gateway.make_key('alice')
        metadata = bearer(created.secret)
        stub = sampler_service_pb2_grpc.SamplerServiceStub(running.gateway.channel)
        request = sample_request(params={'max_tokens': MAX_TOKENS})
        batch = sampler_service_pb2.SampleBatchRequest(
            base_model=request.base_model, prompts=[request.prompt], params=request.params
        )
        calls = [
            stub.SampleBatch(batch, metadata=metadata),
            stub.Sample(request, metadata=metadata),
            stub.WatchLoad(sampler_service_pb2.WatchLoadRequest(), metadata=metadata),
        ]
        for call in calls[1:]:
            await call.read()
        await _revoke(running.gateway, created)
        for call in calls:
            assert (await _failure_of(call)).reason == 'CREDENTIALS_INVALID'


async def test_key_revoked_at_another_gateway_closes_streams(upstream: Upstream, tmp_path: Path) -> None:
    """Streams fail once the cached key is stale, even if another gateway on the same database revoked it."""
    database = f'sqlite:///{tmp_path / "shared.db"}'
    fields: dict[str, Any] = {'upstream': upstream.address, 'database_url': database, 'key_pepper': '11' * 32}
    async with (
        running_gateway(tmp_path / 'one', key_memory=SHORT, **fields) as one,
        running_gateway(tmp_path / 'two', key_memory=SHORT, **fields) as two,
    ):
        created = await one.make_key('alice')
        call = await _open(one, WATCH_FLEET, created.secret)
        await call.read()
        await _revoke(two, created)
        one.clock.advance(SHORT)
        assert (await _failure_of(call)).reason == 'CREDENTIALS_INVALID'


async def test_link_is_refused_after_the_last_key_of_its_tenant(tmp_path: Path) -> None:
    """A signed link works while its tenant has a valid key, and is refused after the last key is revoked."""
    async with tinker_catalogue(tmp_path) as api:
        await api.save('best')
        second = await api.gateway.make_key('alice')
        url = (await api.call('GET', f'{BEST}/archive')).headers['location']
        listed = await _keys(api.gateway).ListKeys(key_service_pb2.ListKeysRequest(tenant_id='alice'), metadata=ADMIN)
        for key in listed.keys:
            if key.key_id != second.key.key_id:
                await _keys(api.gateway).RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=key.key_id), metadata=ADMIN)
        assert (await api.http.get(url)).status_code == 200
        await _revoke(api.gateway, second)
        assert (await api.http.get(url)).status_code == 401


async def test_http_stream_fails_after_its_key_is_revoked(tmp_path: Path) -> None:
    """A completion that streams over HTTP ends with an error event after its key is revoked."""
    engine = FakeSamplerEngine(context_tokens=2 * MAX_TOKENS, max_sequences=4)
    async with openai_gateway(tmp_path, engine, key_memory=SHORT) as running:
        created = await running.gateway.make_key('alice')
        stream = await running.client(created.secret).completions.create(
            model='tiny', prompt='x', max_tokens=MAX_TOKENS, stream=True, extra_body={'ignore_eos': True}
        )
        await anext(stream)
        await _revoke(running.gateway, created)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert facts_of(caught.value)['code'] == 'invalid_api_key'
