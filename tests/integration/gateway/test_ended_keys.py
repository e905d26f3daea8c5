"""A key that is revoked, replaced or expired ends the streams and the links that it opened."""

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
from services.gateway.credentials import Access, requirement_of
from services.gateway.forwarding.endpoints import FORWARDED
from twinkle.api.gateway.v1 import fleet_service_pb2, key_service_pb2, key_service_pb2_grpc
from twinkle.api.model.v1 import training_service_pb2, training_service_pb2_grpc
from twinkle.api.sampler.v1 import sampler_service_pb2, sampler_service_pb2_grpc

SHORT = timedelta(milliseconds=200)
"""Interval between two checks of an open stream."""
LONG = timedelta(hours=1)
ENDLESS = 400_000
"""Tokens of a sequence that no test waits for."""
STREAMS = {
    f'/{service.full_name}/{method.name}': method.client_streaming
    for services in FORWARDED.values()
    for service in services
    for method in service.methods
    if (method.client_streaming or method.server_streaming)
    and requirement_of(f'{service.full_name}/{method.name}') is not Access.INTERNAL
}
"""Forwarded methods with a stream, and whether clients send one."""
WATCH_FLEET = f'/{fleet_service_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name}/WatchFleet'
End = Callable[[RunningGateway, Any], Awaitable[None]]


def _keys(gateway: RunningGateway) -> key_service_pb2_grpc.KeyServiceStub:
    return key_service_pb2_grpc.KeyServiceStub(gateway.channel)


async def _revoke(gateway: RunningGateway, made: Any) -> None:
    await _keys(gateway).RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=made.key.key_id), metadata=ADMIN)


async def _replace(gateway: RunningGateway, made: Any) -> None:
    request = key_service_pb2.RotateKeyRequest(key_id=made.key.key_id)
    request.overlap.FromTimedelta(timedelta())
    await _keys(gateway).RotateKey(request, metadata=ADMIN)


async def _expire(gateway: RunningGateway, made: Any) -> None:
    gateway.clock.advance(made.key.expire_time.ToDatetime() - made.key.create_time.ToDatetime())


class SilentServices(grpc.GenericRpcHandler):
    """Services that keep every stream open without a response."""

    def __init__(self) -> None:
        self.begun = {path: asyncio.Event() for path in STREAMS}
        self.ended = {path: asyncio.Event() for path in STREAMS}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method with a stream, or None."""
        path: Any = handler_call_details.method
        if path not in STREAMS:
            return None

        async def hold(requests: Any, context: Any) -> None:
            del requests, context
            self.begun[path].set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended[path].set()

        return grpc.stream_stream_rpc_method_handler(hold)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve until the block ends, and yield the address."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self,))
        port = server.add_insecure_port('127.0.0.1:0')
        await server.start()
        try:
            yield f'127.0.0.1:{port}'
        finally:
            await server.stop(0)


async def _open(gateway: RunningGateway, path: str, secret: str) -> Any:
    """Start a method and send one message; a stream of requests stays open."""
    call = gateway.channel.stream_stream(path)(metadata=bearer(secret))
    await call.write(b'')
    if not STREAMS.get(path, False):
        await call.done_writing()
    return call


async def _end_of(call: Any) -> Failure:
    """Read a stream to its end, and return its failure."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return Failure.of(error)
    raise AssertionError('the stream ended without a failure')


@pytest.mark.parametrize('end', [_revoke, _replace, _expire])
async def test_idle_streams_end_with_their_key(tmp_path: Path, end: End) -> None:
    """Every open stream is refused like an unknown key, at the gateway and at the service, without any message."""
    services = SilentServices()
    assert len(STREAMS) > 7
    async with (
        services.serving() as address,
        running_gateway(tmp_path, upstream=address, key_memory=SHORT) as gateway,
    ):
        ended, valid = await gateway.make_key('alice', ttl=timedelta(minutes=1)), await gateway.make_key('alice')
        calls = {path: await _open(gateway, path, ended.secret) for path in STREAMS}
        calls[WATCH_FLEET] = await _open(gateway, WATCH_FLEET, ended.secret)
        await calls[WATCH_FLEET].read()
        other = await _open(gateway, WATCH_FLEET, valid.secret)
        for begun in services.begun.values():
            await begun.wait()
        await end(gateway, ended)
        for path, call in calls.items():
            failure = await _end_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, 'CREDENTIALS_INVALID'), path
        for done in services.ended.values():
            await done.wait()
        assert not other.done()


@pytest.mark.parametrize('end', [_revoke, _replace, _expire])
async def test_no_message_passes_after_the_end_of_the_key(upstream: Upstream, tmp_path: Path, end: End) -> None:
    """The first operation on an open `Train` stream after the end of its key is refused and not forwarded."""
    async with running_gateway(tmp_path, upstream=upstream.address, key_memory=LONG) as gateway:
        made = await gateway.make_key('alice', ttl=timedelta(minutes=1))
        train = training_service_pb2_grpc.TrainingServiceStub(gateway.channel).Train(metadata=bearer(made.secret))
        request = training_service_pb2.TrainRequest()
        request.operation.adapter_id, request.operation.sequence_number = 'a', 1
        await train.write(request)
        assert (await train.read()).result.sequence_number == 1
        await end(gateway, made)
        await train.write(request)
        assert (await _end_of(train)).reason == 'CREDENTIALS_INVALID'
        assert upstream.training.received_count == 1


async def test_samples_end_with_the_key(tmp_path: Path) -> None:
    """`Sample`, `SampleBatch` and `WatchLoad`, which send without pause, end soon after their key."""
    engine = FakeSamplerEngine(context_tokens=2 * ENDLESS, max_sequences=4)
    async with openai_gateway(tmp_path, engine, key_memory=SHORT) as running:
        made = await running.gateway.make_key('alice')
        metadata = bearer(made.secret)
        stub = sampler_service_pb2_grpc.SamplerServiceStub(running.gateway.channel)
        request = sample_request(params={'max_tokens': ENDLESS})
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
        await _revoke(running.gateway, made)
        for call in calls:
            assert (await _end_of(call)).reason == 'CREDENTIALS_INVALID'


async def test_key_revoked_at_another_gateway_ends_streams_here(upstream: Upstream, tmp_path: Path) -> None:
    """Streams end once the cached key is stale, also if another gateway on the same database revoked it."""
    database = f'sqlite:///{tmp_path / "shared.db"}'
    fields: dict[str, Any] = {'upstream': upstream.address, 'database_url': database, 'key_pepper': '11' * 32}
    async with (
        running_gateway(tmp_path / 'one', key_memory=SHORT, **fields) as one,
        running_gateway(tmp_path / 'two', key_memory=SHORT, **fields) as two,
    ):
        made = await one.make_key('alice')
        call = await _open(one, WATCH_FLEET, made.secret)
        await call.read()
        await _revoke(two, made)
        one.clock.advance(SHORT)
        assert (await _end_of(call)).reason == 'CREDENTIALS_INVALID'


async def test_link_ends_with_the_last_key_of_its_tenant(tmp_path: Path) -> None:
    """A signed link is followed while its tenant has a valid key, and refused after the last one was revoked."""
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


async def test_http_events_end_with_the_key(tmp_path: Path) -> None:
    """A completion that streams over HTTP ends with an error event soon after its key was revoked."""
    engine = FakeSamplerEngine(context_tokens=2 * ENDLESS, max_sequences=4)
    async with openai_gateway(tmp_path, engine, key_memory=SHORT) as running:
        made = await running.gateway.make_key('alice')
        stream = await running.client(made.secret).completions.create(
            model='tiny', prompt='x', max_tokens=ENDLESS, stream=True, extra_body={'ignore_eos': True}
        )
        await anext(stream)
        await _revoke(running.gateway, made)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert facts_of(caught.value)['code'] == 'invalid_api_key'
