"""Tests of interrupted calls of the OpenAI API: clients disconnect or stop reading, samplers and gateways stop."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.openai_gateway import OpenAiGateway, facts_of, openai_gateway
from fixtures.running_gateway import ADMIN_KEY, running_gateway

MAX_TOKENS = 400_000
"""Length in tokens of a sequence that no test reads completely."""
HEADERS = {'authorization': f'Bearer {ADMIN_KEY}'}


class CountingEngine(FakeSamplerEngine):
    """An engine that counts its generation steps."""

    def __init__(self) -> None:
        super().__init__(context_tokens=MAX_TOKENS + 100, max_sequences=8)
        self.step_total = 0

    async def _step(self) -> None:
        self.step_total += 1
        await super()._step()


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway with an engine that counts its steps."""
    async with openai_gateway(tmp_path, CountingEngine()) as gateway:
        yield gateway


def long_request(**fields: Any) -> dict[str, Any]:
    """Return a request whose response is very long."""
    return {'model': 'tiny', 'prompt': 'a', 'max_tokens': MAX_TOKENS, 'ignore_eos': True, **fields}


def request_head(length: int) -> bytes:
    """Return the head of a request with a body of `length` bytes."""
    lines = (
        'POST /v1/completions HTTP/1.1',
        'host: x',
        f'authorization: Bearer {ADMIN_KEY}',
        f'content-length: {length}',
    )
    return '\r\n'.join((*lines, '', '')).encode()


async def read_and_abort(running: OpenAiGateway, stream: Any) -> None:
    """Read a stream to its end, and abort its sequences once they have tokens."""
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            for request_id in running.engine.request_ids:
                await running.engine.abort(request_id)


async def test_closing_a_stream_cancels_its_sampling(running: OpenAiGateway) -> None:
    """A client that closes its stream cancels the sequences of all prompts."""
    client = running.client()
    for prompt in ('a', ['a', 'b', 'c']):
        stream = await client.completions.create(
            model='tiny', prompt=prompt, max_tokens=MAX_TOKENS, stream=True, extra_body={'ignore_eos': True}
        )
        async for chunk in stream:
            assert chunk.choices
            break
        await running.sampler.wait_for_load(1 if prompt == 'a' else 3)
        await stream.close()
        await running.sampler.wait_for_load(0)


async def test_disconnect_before_the_response_cancels_its_sampling(running: OpenAiGateway) -> None:
    """A client that disconnects before the complete response cancels its sequences."""
    request_task = asyncio.create_task(running.post('/completions', long_request(n=2)))
    await running.sampler.wait_for_load(2)
    request_task.cancel()
    await running.sampler.wait_for_load(0)


@pytest.mark.slow
async def test_unread_stream_blocks_no_other_stream(running: OpenAiGateway) -> None:
    """A client that stops reading blocks only its own stream's generation, and can continue later."""
    host, _, port = running.gateway.http_address.rpartition(':')
    body = json.dumps(long_request(stream=True, logprobs=20)).encode()
    head = (
        f'POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\ncontent-length: {len(body)}'
    )
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(head.encode() + b'\r\ncontent-type: application/json\r\n\r\n' + body)
    assert (await reader.readline()).startswith(b'HTTP/1.1 200')
    engine = running.engine
    assert isinstance(engine, CountingEngine)
    steps, other_steps = -1, 0
    client = running.client()
    while steps != engine.step_total - other_steps:
        # Until the connection's buffers are full, the unread stream advances a little during each completion.
        steps = engine.step_total - other_steps
        await client.completions.create(model='tiny', prompt='b', max_tokens=32, extra_body={'ignore_eos': True})
        other_steps += 1 + 32
    assert engine.load.running_sequences == 1
    assert steps < MAX_TOKENS / 4
    while engine.step_total - other_steps <= steps:
        assert await reader.read(1024)
    writer.close()
    await running.sampler.wait_for_load(0)


async def test_error_in_a_stream_is_its_last_event(running: OpenAiGateway) -> None:
    """If the engine aborts a sequence, its stream ends with an error event, for which the SDK raises an error."""
    stream = await running.client().chat.completions.create(
        model='tiny',
        messages=[{'role': 'user', 'content': 'a'}],
        max_tokens=MAX_TOKENS,
        stream=True,
        extra_body={'ignore_eos': True},
    )
    with pytest.raises(openai.APIError) as raised:
        await read_and_abort(running, stream)
    assert facts_of(raised.value)['reason'] == 'CANCELLED'


async def test_disconnect_within_a_body_is_not_a_server_error(running: OpenAiGateway) -> None:
    """A client that disconnects while it sends its body causes no server error."""
    host, _, port = running.gateway.http_address.rpartition(':')
    for _ in range(3):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_head(100) + b'{"model": ')
        await writer.drain()
        writer.close()
        assert await reader.read() == b''
    assert (await running.post('/completions', long_request(max_tokens=2))).status_code == 200


async def test_draining_server_ends_slow_calls_with_an_error(tmp_path: Path) -> None:
    """A stopping server ends slow calls that are still running with an error, and accepts no further connections."""
    async with openai_gateway(tmp_path, CountingEngine()) as running:
        async with httpx.AsyncClient(timeout=60) as client:
            url = f'{running.base_url}/completions'
            async with client.stream('POST', url, json=long_request(stream=True), headers=HEADERS) as response:
                lines = response.aiter_lines()
                assert (await anext(lines)).startswith('data: {')
                health = f'http://{running.gateway.http_address}/healthz'
                assert (await client.get(health)).json()['status'] == 'serving'
                assert running.gateway.http is not None
                stopping = asyncio.create_task(running.gateway.http.stop(timedelta()))
                rest = [line async for line in lines if line]
            await stopping
            error = json.loads(rest[-1].removeprefix('data: '))['error']
            assert error['reason'] == 'DRAINING'
            with pytest.raises(httpx.ConnectError):
                await client.get(health)
        await running.sampler.wait_for_load(0)


async def test_gateway_without_samplers_is_unavailable(tmp_path: Path) -> None:
    """Calls without a sampler get status 503 with a retry time, and the server stays healthy."""
    async with running_gateway(tmp_path, http_listen='127.0.0.1:0') as gateway, httpx.AsyncClient() as client:
        url = f'http://{gateway.http_address}'
        response = await client.post(f'{url}/v1/completions', json={'model': 'tiny', 'prompt': 'a'}, headers=HEADERS)
        assert (response.status_code, response.json()['error']['reason']) == (503, 'NO_REPLICA')
        assert response.headers['retry-after'] == '1'
        assert (await client.get(f'{url}/healthz')).status_code == 200
