"""Bytes of HTTP bodies in memory: counted before they are read, refused where there is no room, and given back."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zstandard

from fixtures.tinker_api import TinkerApi, tinker_api
from services.gateway.http.body import ClientGone, Pace, read_bytes
from services.gateway.http.call import CallMemory, HttpCall, JsonResponse, MemoryGates, Route, json_work_bytes
from services.gateway.tinker.errors import TinkerErrors
from services.kit.byte_gate import ByteGate
from services.kit.errors import BytesFull, DeadlinePassed, MessageTooLarge

KIB = 1 << 10
MIB = 1 << 20
PROTOBUF = {'content-type': 'application/x-protobuf'}


@pytest.fixture
def gates() -> MemoryGates:
    """Room for one body of a MiB of each tenant."""
    bodies = ByteGate(tenant_bytes=MIB * 5 // 4, total_bytes=8 * MIB, wait_seconds=0)
    return MemoryGates(bodies=bodies, work=ByteGate(tenant_bytes=64 * MIB, total_bytes=256 * MIB, wait_seconds=0))


@pytest.fixture
async def api(gates: MemoryGates) -> AsyncIterator[TinkerApi]:
    """The API, with little memory."""
    async with tinker_api(memory=gates) as running:
        yield running


async def nothing(call: HttpCall) -> Any:
    """Serve nothing."""
    raise AssertionError(call)


def call_of(pieces: AsyncIterator[bytes], *, length: int | None = None, memory: CallMemory | None = None) -> HttpCall:
    """Return a call whose body comes in pieces."""

    async def receive() -> dict[str, Any]:
        try:
            return {'type': 'http.request', 'body': await anext(pieces), 'more_body': True}
        except StopAsyncIteration:
            return {'type': 'http.request', 'body': b'', 'more_body': False}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    route = Route(path='/', http_method='POST', name='x', method='/x', serve=nothing, errors=TinkerErrors())
    headers = {} if length is None else {'content-length': str(length)}
    return HttpCall(route, {}, receive, send, headers, 'rq-1', memory=memory)


async def endless(size: int) -> AsyncIterator[bytes]:
    """Yield pieces for ever."""
    while True:
        await asyncio.sleep(0)
        yield bytes(size)


async def some(count: int, size: int) -> AsyncIterator[bytes]:
    """Yield a few pieces."""
    for _ in range(count):
        yield bytes(size)


async def test_body_that_finds_no_room_is_refused_for_now_and_served_later(api: TinkerApi, gates: MemoryGates) -> None:
    """It is 429 with a time to try again, whether its length is announced or not; small ones and others go on."""
    model_id = await api.model()
    await gates.bodies.take('alice', MIB)
    for headers in ({}, {'transfer-encoding': 'chunked'}):
        content: Any = b'[' + b' ' * 255 * KIB
        chunked = some(4, 60 * KIB) if headers else content
        answer = await api.post('create_session', content=chunked, headers=headers)
        assert (answer.status_code, answer.json()['reason']) == (429, 'QUEUE_FULL')
        assert int(answer.headers['retry-after']) >= 1
        assert answer.headers['x-should-retry'] == 'true'
    assert (await api.post('get_info', {'model_id': model_id})).status_code == 200
    assert (await api.post('create_session', content=content, key='tml-bob')).status_code == 400
    gates.bodies.give_back('alice', MIB)
    assert (await api.post('create_session', content=content)).status_code == 400
    assert gates.bodies.held_bytes == gates.work.held_bytes == 0


async def test_all_kinds_of_ends_give_memory_back(api: TinkerApi, gates: MemoryGates) -> None:
    """Answers, refusals, bodies that are cut off and bombs."""
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


async def test_body_of_many_containers_is_served_alone(api: TinkerApi, gates: MemoryGates) -> None:
    """Its values take many times its bytes: while others take so much, it is refused for now."""
    body = json.dumps({'request_id': 'x', 'more': [[]] * 10_000}).encode()
    assert json_work_bytes(body) > 15 * len(body)
    other = gates.work.hold('alice')
    await other.grow(gates.work.largest_bytes)
    assert (await api.post('retrieve_future', content=body)).status_code == 429
    other.release()
    assert (await api.post('retrieve_future', content=body)).status_code == 404


async def test_announced_body_is_counted_before_it_is_read() -> None:
    """Not a byte of it has come, and another one finds no room."""
    gates = MemoryGates(
        bodies=ByteGate(tenant_bytes=2 * MIB, total_bytes=8 * MIB, wait_seconds=0),
        work=ByteGate(tenant_bytes=MIB, total_bytes=MIB, wait_seconds=0),
    )
    first, second = CallMemory(gates, 'alice'), CallMemory(gates, 'alice')
    begun = asyncio.create_task(read_bytes(call_of(endless(0), length=MIB, memory=first), limit_bytes=MIB))
    await asyncio.sleep(0)
    assert gates.bodies.held_bytes == MIB
    with pytest.raises(BytesFull):
        await read_bytes(call_of(some(16, 64 * KIB), length=MIB, memory=second), limit_bytes=MIB)
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    first.release()
    assert len(await read_bytes(call_of(some(16, 64 * KIB), length=MIB, memory=second), limit_bytes=MIB)) == MIB


async def test_body_without_end_or_pace_is_cut_off() -> None:
    """One that is too long after twice its limit; one that trickles when its grace is over; a good one is not."""
    with pytest.raises(MessageTooLarge):
        await read_bytes(call_of(endless(KIB)), limit_bytes=16 * KIB)
    pace = Pace(grace_seconds=0.05, slowest_bytes=1 << 20)
    with pytest.raises(DeadlinePassed):
        await read_bytes(call_of(endless(1)), limit_bytes=16 * MIB, pace=pace)
    assert len(await read_bytes(call_of(some(64, MIB // 64)), limit_bytes=MIB, pace=pace)) == MIB


async def test_client_that_leaves_is_no_body() -> None:
    """Its connection ended in the middle."""

    async def gone() -> dict[str, Any]:
        return {'type': 'http.disconnect'}

    call = call_of(some(0, 0))
    call.receive = gone
    with pytest.raises(ClientGone):
        await read_bytes(call, limit_bytes=KIB)


@pytest.mark.parametrize('size', [0, 1, (1 << 18) - 100, (1 << 18) + 1, 3 << 18])
async def test_long_answers_are_written_piece_by_piece(size: int) -> None:
    """Whole, in order, no piece larger than a client has to read before the next one is made."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    call = call_of(some(0, 0))
    call.send = send
    await JsonResponse({'x': 'y' * size}).write(call)
    pieces = [message['body'] for message in sent[1:]]
    assert b''.join(pieces) == json.dumps({'x': 'y' * size}, separators=(',', ':')).encode()
    assert max(map(len, pieces)) <= 1 << 18
    assert [message['more_body'] for message in sent[1:]] == [True] * (len(pieces) - 1) + [False]
