"""Clients that mean no good: odd heads and methods, readers that stop, hundreds that hang up at once."""

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.fake_samplers import until
from fixtures.openai_gateway import OpenAiGateway, openai_gateway
from fixtures.running_gateway import ADMIN_KEY

STREAMS = 200
ENDLESS = 400_000
"""Tokens of an answer that no test waits for."""


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway before an engine whose answers may be very long."""
    engine = FakeSamplerEngine(context_tokens=ENDLESS + 100, max_sequences=STREAMS)
    async with openai_gateway(tmp_path, engine) as found:
        yield found


async def raw(running: OpenAiGateway, head: bytes) -> bytes:
    """Return the answer to bytes as they are."""
    host, _, port = running.gateway.http_address.rpartition(':')
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)
    answer = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


def head_of(method: str, path: str, *, host: str = 'x', length: int = 0) -> bytes:
    """Return the head of a call that closes its connection."""
    lines = (
        f'{method} {path} HTTP/1.1',
        f'host: {host}',
        f'authorization: Bearer {ADMIN_KEY}',
        'connection: close',
        f'content-length: {length}',
    )
    return '\r\n'.join((*lines, '', '')).encode()


async def test_odd_heads_and_methods_are_never_our_fault(running: OpenAiGateway) -> None:
    """Whatever the host, the path and the method are, the answer is below 500; that to HEAD has no body."""
    for host in ('[', '[::1', 'a b', '', '\x7f', 'x' * 1000, '::', '[v1.x]'):
        answer = await raw(running, head_of('GET', '/nowhere', host=host))
        assert answer.startswith(b'HTTP/1.1 4'), (host, answer)
    for path in ('/v1/models/', '/v1/models/%00', '/v1/models/%ED%A0%80', '//', '/%2e%2e/', '*', '/v1/models/a%0Ab'):
        answer = await raw(running, head_of('GET', path))
        assert answer.startswith(b'HTTP/1.1 4'), (path, answer)
    for method in ('OPTIONS', 'HEAD', 'DELETE', 'PUT', 'PATCH', 'TRACE', 'WHATEVER'):
        for path in ('/v1/chat/completions', '/nowhere'):
            answer = await raw(running, head_of(method, path))
            assert answer.startswith((b'HTTP/1.1 404', b'HTTP/1.1 405')), (method, path, answer)
    head = await raw(running, head_of('HEAD', '/v1/models'))
    assert head.startswith(b'HTTP/1.1 200')
    assert head.endswith(b'\r\n\r\n')


async def test_no_character_reaches_the_catalogue_that_it_cannot_hold(running: OpenAiGateway) -> None:
    """A model's name with NUL in it is not found, whatever the database thinks of that."""
    answer = await running.post('/completions', {'model': 'a\0b', 'prompt': 'a'})
    assert (answer.status_code, answer.json()['error']['code']) == (404, 'model_not_found')


async def test_name_that_is_half_a_character_is_refused(running: OpenAiGateway) -> None:
    """A name that no answer can spell, and that comes twice, is 400 like any other."""
    answer = await running.post('/completions', content=b'{"\\ud800": 1, "\\ud800": 2}')
    assert (answer.status_code, answer.json()['error']['reason']) == (400, 'INVALID_FIELD')


@pytest.mark.timeout(180)
async def test_slow_readers_cost_little_and_leave_nothing(running: OpenAiGateway) -> None:
    """Streams that nobody reads hold their samplers back in bounded memory; cut off, all of them are ended."""
    tasks = len(asyncio.all_tasks())
    before = psutil.Process(os.getpid()).memory_info().rss
    sockets = [_begin_stream(running) for _ in range(STREAMS)]
    await running.sampler.wait_for_load(STREAMS)
    for _ in range(20):
        fine = await running.post('/completions', {'model': 'tiny', 'prompt': 'a', 'max_tokens': 1, 'logprobs': 20})
        assert fine.status_code == 200
    grown = psutil.Process(os.getpid()).memory_info().rss - before
    assert grown < STREAMS << 20
    for stream in sockets:
        # With no time to linger the connection is reset, not closed.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        stream.close()
    await running.sampler.wait_for_load(0)
    assert running.engine.request_ids == ()
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


def _begin_stream(running: OpenAiGateway) -> Any:
    """Ask for an endless stream whose answer is not read."""
    host, _, port = running.gateway.http_address.rpartition(':')
    fields = {'model': 'tiny', 'prompt': 'a', 'max_tokens': ENDLESS, 'ignore_eos': True, 'stream': True, 'logprobs': 5}
    body = json.dumps(fields).encode()
    stream = socket.socket()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.connect((host, int(port)))
    stream.sendall(head_of('POST', '/v1/completions', length=len(body)) + body)
    return stream
