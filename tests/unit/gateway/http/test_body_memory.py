"""Memory for an HTTP body is reserved before the body is read, refused if exhausted, and released afterwards."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import zstandard

from fixtures.tinker_api import TinkerApi, tinker_api
from twinkle_services.gateway.http.body import ClientDisconnected, Pace, parse_object, read_bytes
from twinkle_services.gateway.http.call import CallMemory, HttpCall, JsonResponse, MemoryGates, Route, json_work_bytes
from twinkle_services.gateway.openai.anthropic_request import message_request
from twinkle_services.gateway.openai.chat_request import chat_request
from twinkle_services.gateway.openai.responses_request import item_request
from twinkle_services.gateway.store.database import Database
from twinkle_services.gateway.tinker.routes import TinkerErrors
from twinkle_services.gateway.tinker.sampling import sample_request
from twinkle_services.kit.byte_gate import ByteGate
from twinkle_services.kit.errors import BytesFull, DeadlinePassed, MessageTooLarge

KIB = 1 << 10
MIB = 1 << 20
PROTOBUF = {'content-type': 'application/x-protobuf'}


@pytest.fixture
def gates() -> MemoryGates:
    """Gates with memory for one body of 1 MiB per tenant."""
    bodies = ByteGate(tenant_bytes=MIB * 5 // 4, total_bytes=8 * MIB, wait_seconds=0)
    return MemoryGates(bodies=bodies, work=ByteGate(tenant_bytes=64 * MIB, total_bytes=256 * MIB, wait_seconds=0))


@pytest.fixture
async def api(database: Database, gates: MemoryGates) -> AsyncIterator[TinkerApi]:
    """The Tinker API with little memory."""
    async with tinker_api(database, memory=gates) as running:
        yield running


async def never_served(call: HttpCall) -> Any:
    """Fail, because no test calls the route."""
    raise AssertionError(call)


def call_of(parts: AsyncIterator[bytes], *, length: int | None = None, memory: CallMemory | None = None) -> HttpCall:
    """Return a call whose body arrives in chunks."""

    async def receive() -> dict[str, Any]:
        try:
            return {'type': 'http.request', 'body': await anext(parts), 'more_body': True}
        except StopAsyncIteration:
            return {'type': 'http.request', 'body': b'', 'more_body': False}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    route = Route(path='/', http_method='POST', name='x', method='/x', serve=never_served, errors=TinkerErrors())
    headers = {} if length is None else {'content-length': str(length)}
    return HttpCall(route, {}, receive, send, headers, 'rq-1', memory=memory)


async def endless(size: int) -> AsyncIterator[bytes]:
    """Yield chunks forever."""
    while True:
        await asyncio.sleep(0)
        yield bytes(size)


async def chunks(count: int, size: int) -> AsyncIterator[bytes]:
    """Yield `count` chunks of `size` bytes."""
    for _ in range(count):
        yield bytes(size)


async def test_body_without_free_memory_is_refused_with_a_retry_time(api: TinkerApi, gates: MemoryGates) -> None:
    """A body without free memory is refused with 429 and a retry time; small bodies and other tenants are served."""
    model_id = await api.model()
    await gates.bodies.take('alice', MIB)
    for headers in ({}, {'transfer-encoding': 'chunked'}):
        content: Any = b'[' + b' ' * 255 * KIB
        chunked = chunks(4, 60 * KIB) if headers else content
        response = await api.post('create_session', content=chunked, headers=headers)
        assert (response.status_code, response.json()['reason']) == (429, 'QUEUE_FULL')
        assert int(response.headers['retry-after']) >= 1
        assert response.headers['x-should-retry'] == 'true'
    assert (await api.post('get_info', {'model_id': model_id})).status_code == 200
    assert (await api.post('create_session', content=content, key='tml-bob')).status_code == 400
    gates.bodies.give_back('alice', MIB)
    assert (await api.post('create_session', content=content)).status_code == 400
    assert gates.bodies.held_bytes == gates.work.held_bytes == 0


async def test_every_outcome_releases_memory(api: TinkerApi, gates: MemoryGates) -> None:
    """Responses, refusals, truncated bodies and decompression bombs all release their memory."""
    model_id = await api.model()
    bomb = zstandard.compress(bytes(32 * MIB))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(32 * MIB))
    for body in (bomb, unsized, bomb[:-3], b'', b'x', bytes(60 * KIB)):
        for encoding in ('zstd', 'identity'):
            headers = {**PROTOBUF, 'content-encoding': encoding}
            assert (await api.post('forward_backward', content=body, headers=headers)).status_code in {400, 413}
    good = {'model_id': model_id, 'seq_id': 1}
    assert (await api.post('optim_step', good)).status_code == 200
    assert gates.bodies.held_bytes == gates.work.held_bytes == 0


async def test_body_of_many_containers_reserves_more_than_its_bytes(api: TinkerApi, gates: MemoryGates) -> None:
    """A body of many containers reserves more memory than its bytes, and is refused if this memory is not free."""
    body = json.dumps({'request_id': 'x', 'more': [[]] * 10_000}).encode()
    assert json_work_bytes(body) > 15 * len(body)
    other = gates.work.hold('alice')
    await other.grow(gates.work.largest_bytes)
    assert (await api.post('retrieve_future', content=body)).status_code == 429
    other.release()
    assert (await api.post('retrieve_future', content=body)).status_code == 404


def _list_of(item: str, size_bytes: int = 256 * KIB) -> str:
    return f'[{",".join([item] * (size_bytes // (len(item) + 1)))}]'


@pytest.mark.parametrize(
    ('make', 'body', 'item'),
    [
        pytest.param(
            chat_request,
            '{"model":"m","messages":ITEMS}',
            '{"role":"user","content":""}',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            chat_request,
            '{"model":"m","messages":[{"role":"assistant","tool_calls":ITEMS}]}',
            '{"function":{"name":"a"}}',
            marks=pytest.mark.slow,
        ),
        (chat_request, '{"model":"m","messages":[{"role":"user","content":ITEMS}]}', '{"type":"text","text":""}'),
        pytest.param(
            item_request, '{"model":"m","input":ITEMS}', '{"role":"user","content":""}', marks=pytest.mark.slow
        ),
        pytest.param(
            message_request,
            '{"model":"m","max_tokens":1,"messages":ITEMS}',
            '{"role":"user","content":""}',
            marks=pytest.mark.slow,
        ),
        (
            item_request,
            '{"model":"m","input":"a","tools":[{"type":"function","name":"a","parameters":{"enum":ITEMS}}]}',
            '1',
        ),
        (sample_request, '{"base_model":"m","prompt":{"chunks":ITEMS},"sampling_params":{}}', '{"tokens":[1]}'),
        (sample_request, '{"base_model":"m","prompt":{"chunks":[{"tokens":ITEMS}]},"sampling_params":{}}', '1'),
    ],
    ids=['messages', 'tool-calls', 'parts', 'items', 'blocks', 'schemas', 'chunks', 'tokens'],
)
def test_parsed_body_takes_no_more_memory_than_it_reserves(
    make: Callable[[dict[str, Any]], object], body: str, item: str
) -> None:
    """Parsing a body of as many small objects as possible uses no more memory than the call reserves."""
    data = body.replace('ITEMS', _list_of(item)).encode()
    make(parse_object(data))
    gc.collect()
    tracemalloc.start()
    try:
        make(parse_object(data))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= json_work_bytes(data)


async def test_body_with_a_content_length_reserves_memory_before_it_is_read() -> None:
    """A body with a content length reserves its memory before any byte arrives."""
    gates = MemoryGates(
        bodies=ByteGate(tenant_bytes=2 * MIB, total_bytes=8 * MIB, wait_seconds=0),
        work=ByteGate(tenant_bytes=MIB, total_bytes=MIB, wait_seconds=0),
    )
    first, second = CallMemory(gates, 'alice'), CallMemory(gates, 'alice')
    reading = asyncio.create_task(read_bytes(call_of(endless(0), length=MIB, memory=first), limit_bytes=MIB))
    await asyncio.sleep(0)
    assert gates.bodies.held_bytes == MIB
    with pytest.raises(BytesFull):
        await read_bytes(call_of(chunks(16, 64 * KIB), length=MIB, memory=second), limit_bytes=MIB)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    first.release()
    assert len(await read_bytes(call_of(chunks(16, 64 * KIB), length=MIB, memory=second), limit_bytes=MIB)) == MIB


async def test_endless_or_slow_body_is_refused() -> None:
    """An endless body is refused as too large; a body that is too slow after the grace period is refused too."""
    with pytest.raises(MessageTooLarge):
        await read_bytes(call_of(endless(KIB)), limit_bytes=16 * KIB)
    pace = Pace(grace_seconds=0.05, slowest_bytes=1 << 20)
    with pytest.raises(DeadlinePassed):
        await read_bytes(call_of(endless(1)), limit_bytes=16 * MIB, pace=pace)
    assert len(await read_bytes(call_of(chunks(64, MIB // 64)), limit_bytes=MIB, pace=pace)) == MIB


async def test_disconnect_within_the_body_raises() -> None:
    """If a client disconnects before the end of its body, reading the body raises ClientDisconnected."""

    async def disconnected() -> dict[str, Any]:
        return {'type': 'http.disconnect'}

    call = call_of(chunks(0, 0))
    call.receive = disconnected
    with pytest.raises(ClientDisconnected):
        await read_bytes(call, limit_bytes=KIB)


@pytest.mark.parametrize('size', [0, 1, (1 << 18) - 100, (1 << 18) + 1, 3 << 18])
async def test_long_responses_are_written_in_chunks(size: int) -> None:
    """A long response is written in order, in chunks of bounded size."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    call = call_of(chunks(0, 0))
    call.send = send
    await JsonResponse({'x': 'y' * size}).write(call)
    parts = [message['body'] for message in sent[1:]]
    assert b''.join(parts) == json.dumps({'x': 'y' * size}, separators=(',', ':')).encode()
    assert max(map(len, parts)) <= 1 << 18
    assert [message['more_body'] for message in sent[1:]] == [True] * (len(parts) - 1) + [False]
