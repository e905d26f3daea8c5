"""Tests with hostile clients: unusual request heads and methods, unread streams, and reset connections."""

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.fake_samplers import until
from fixtures.openai_gateway import OpenAiGateway, openai_gateway
from fixtures.running_gateway import ADMIN_KEY
from twinkle_services.sampler.domain.generation import GenerationEvent, GenerationRequest

STREAMS = 64
"""Number of streams that are started and not read, more than a pool of threads has."""
MAX_TOKENS = 400_000
"""Token limit of a stream that never finishes during a test."""


class CountingEngine(FakeSamplerEngine):
    """Engine that counts the events of each request."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.sampled: Counter[str] = Counter()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Count and yield the events of a request."""
        async with contextlib.aclosing(super().generate(request)) as events:
            async for event in events:
                self.sampled[request.request_id] += 1
                yield event


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway with an engine whose sequences may be very long."""
    engine = CountingEngine(context_tokens=MAX_TOKENS + 100, max_sequences=STREAMS)
    async with openai_gateway(tmp_path, engine) as gateway:
        yield gateway


async def send_raw(running: OpenAiGateway, head: bytes) -> bytes:
    """Send bytes, and return the response."""
    host, _, port = running.gateway.http_address.rpartition(':')
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)
    response = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return response


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


async def test_unusual_heads_and_methods_are_client_errors(running: OpenAiGateway) -> None:
    """Unusual hosts, paths and methods give a 4xx status, and HEAD returns no body."""
    for host in ('[', '[::1', 'a b', '', '\x7f', 'x' * 1000, '::', '[v1.x]'):
        response = await send_raw(running, head_of('GET', '/nowhere', host=host))
        assert response.startswith(b'HTTP/1.1 4'), (host, response)
    for path in ('/v1/models/', '/v1/models/%00', '/v1/models/%ED%A0%80', '//', '/%2e%2e/', '*', '/v1/models/a%0Ab'):
        response = await send_raw(running, head_of('GET', path))
        assert response.startswith(b'HTTP/1.1 4'), (path, response)
    for method in ('OPTIONS', 'HEAD', 'DELETE', 'PUT', 'PATCH', 'TRACE', 'UNKNOWN'):
        for path in ('/v1/chat/completions', '/nowhere'):
            response = await send_raw(running, head_of(method, path))
            assert response.startswith((b'HTTP/1.1 404', b'HTTP/1.1 405')), (method, path, response)
    head = await send_raw(running, head_of('HEAD', '/v1/models'))
    assert head.startswith(b'HTTP/1.1 200')
    assert head.endswith(b'\r\n\r\n')


async def test_model_name_with_nul_is_not_found(running: OpenAiGateway) -> None:
    """A model name with a NUL character is not found, although databases cannot store this character."""
    response = await running.post('/completions', {'model': 'a\0b', 'prompt': 'a'})
    assert (response.status_code, response.json()['error']['code']) == (404, 'model_not_found')


async def test_name_with_an_unpaired_surrogate_is_refused(running: OpenAiGateway) -> None:
    """The error for a name with an unpaired surrogate repeats the name, and has status 400."""
    response = await running.post('/completions', content=b'{"\\ud800": 1, "\\ud800": 2}')
    assert (response.status_code, response.json()['error']['reason']) == (400, 'INVALID_FIELD')


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_unread_streams_do_not_block_other_requests(running: OpenAiGateway) -> None:
    """Requests succeed beside more unread streams than threads, which stop when their connections are reset."""
    tasks = len(asyncio.all_tasks())
    sockets = [_start_stream(running) for _ in range(STREAMS)]
    await running.sampler.wait_for_load(STREAMS)
    client = running.client()
    for _ in range(10):
        await client.completions.create(model='tiny', prompt='a', max_tokens=1)
    for stream in sockets:
        # A zero linger time resets the connection instead of closing it.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        stream.close()
    await running.sampler.wait_for_load(0)
    assert running.engine.request_ids == ()
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_slow_readers_use_bounded_memory(running: OpenAiGateway) -> None:
    """The engine stops sampling for an unread stream when the buffers on the way are full, which take about 6 MB."""
    sampled = cast('CountingEngine', running.engine).sampled
    before = psutil.Process(os.getpid()).memory_info().rss
    stream, client = _start_stream(running), running.client()
    await running.sampler.wait_for_load(1)
    [request_id] = running.engine.request_ids
    counts = [0, 1]
    while len(set(counts[-50:])) > 1:
        await client.completions.create(model='tiny', prompt='a', max_tokens=1)
        counts.append(sampled[request_id])
    assert running.engine.request_ids == (request_id,)
    assert psutil.Process(os.getpid()).memory_info().rss - before < 16 << 20
    stream.close()
    await running.sampler.wait_for_load(0)


def _start_stream(running: OpenAiGateway) -> Any:
    """Start a very long stream and do not read the response."""
    host, _, port = running.gateway.http_address.rpartition(':')
    fields = {
        'model': 'tiny',
        'prompt': 'a',
        'max_tokens': MAX_TOKENS,
        'ignore_eos': True,
        'stream': True,
        'logprobs': 20,
    }
    body = json.dumps(fields).encode()
    stream = socket.socket()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.connect((host, int(port)))
    stream.sendall(head_of('POST', '/v1/completions', length=len(body)) + body)
    return stream
