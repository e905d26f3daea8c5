"""Tests with hostile clients: unusual request heads and methods, unread streams, and reset connections."""

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
"""Number of streams that are started and not read."""
MAX_TOKENS = 400_000
"""Token limit of a stream that never finishes during a test."""


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway with an engine whose sequences may be very long."""
    engine = FakeSamplerEngine(context_tokens=MAX_TOKENS + 100, max_sequences=STREAMS)
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
async def test_slow_readers_use_bounded_memory(running: OpenAiGateway) -> None:
    """Unread streams do not block other requests, use bounded memory, and stop when their connections are reset."""
    tasks = len(asyncio.all_tasks())
    before = psutil.Process(os.getpid()).memory_info().rss
    sockets = [_start_stream(running) for _ in range(STREAMS)]
    await running.sampler.wait_for_load(STREAMS)
    for _ in range(20):
        response = await running.post('/completions', {'model': 'tiny', 'prompt': 'a', 'max_tokens': 1, 'logprobs': 20})
        assert response.status_code == 200
    growth = psutil.Process(os.getpid()).memory_info().rss - before
    assert growth < STREAMS << 20
    for stream in sockets:
        # A zero linger time resets the connection instead of closing it.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        stream.close()
    await running.sampler.wait_for_load(0)
    assert running.engine.request_ids == ()
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


def _start_stream(running: OpenAiGateway) -> Any:
    """Start a very long stream and do not read the response."""
    host, _, port = running.gateway.http_address.rpartition(':')
    fields = {
        'model': 'tiny',
        'prompt': 'a',
        'max_tokens': MAX_TOKENS,
        'ignore_eos': True,
        'stream': True,
        'logprobs': 5,
    }
    body = json.dumps(fields).encode()
    stream = socket.socket()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.connect((host, int(port)))
    stream.sendall(head_of('POST', '/v1/completions', length=len(body)) + body)
    return stream
