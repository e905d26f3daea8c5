"""Tests that a gateway limits its memory for large concurrent bodies per tenant, and releases it afterwards."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.fake_samplers import until
from fixtures.gateway_process import GatewayProcess, gateway_process
from twinkle_services.gateway.http.server import HEAD_SECONDS

MIB = 1 << 20
COUNT = 200
BODY = b'{"model_id": "none", "seq_id": 1, "pad": "' + b'x' * (20 * MIB - 44) + b'"}'
LIMIT = 64 * MIB
"""Memory in bytes for the bodies of one tenant."""
MAX_GROWTH = 400 * MIB
"""Limit of the memory growth in bytes, for bodies, parsed values and buffers. The bodies have 3.9 GiB in total."""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    """A gateway with memory for three large bodies per tenant."""
    limits = {'memory__bodies_per_tenant': LIMIT, 'memory__bodies': 4 * LIMIT, 'memory__wait': 'PT1S'}
    async with gateway_process(tmp_path, **limits) as running:
        yield running


@pytest.fixture
async def http(gateway: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a limit on connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    url = f'http://{gateway.http_address}/api/v1/'
    async with httpx.AsyncClient(base_url=url, timeout=100, trust_env=False, limits=limits) as client:
        yield client


async def status_of(http: httpx.AsyncClient, secret: str) -> int:
    """Send a large body and return the status, or 429 if the gateway closes the connection during the upload."""
    try:
        return (await http.post('forward_backward', content=BODY, headers={'x-api-key': secret})).status_code
    except httpx.TransportError:
        return 429


async def peak_memory_during(gateway: GatewayProcess, large_requests: asyncio.Future[Any]) -> int:
    """Return the peak memory in bytes until a future is done."""
    peak = 0
    while not large_requests.done():
        peak = max(peak, gateway.resident_bytes())
        await asyncio.wait([large_requests], timeout=0.02)
    return peak


async def send_small_requests(gateway: GatewayProcess, secret: str, large_requests: asyncio.Future[Any]) -> list[int]:
    """Return the statuses of small requests that are sent while large requests are in progress.

    Head and body are written together, because this process may be too busy to send a separate body before the
    gateway's timeout.
    """
    body = b'{"sdk_version": "0.38.0"}'
    fields = (f'x-api-key: {secret}', 'content-type: application/json', f'content-length: {len(body)}')
    head = '\r\n'.join(('POST /api/v1/create_session HTTP/1.1', 'host: gateway', *fields, '', ''))
    host, _, port = gateway.http_address.rpartition(':')
    statuses: list[int] = []
    loop = asyncio.get_running_loop()
    while not large_requests.done():
        start = loop.time()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        # If this process was too busy to send the head in time, the gateway has closed the connection without a status.
        is_late = loop.time() - start > HEAD_SECONDS / 2
        line = await reader.readline()
        writer.close()
        if line or not is_late:
            statuses.append(int(line.split()[1]))
    return statuses


async def test_bodies_of_one_tenant_take_bounded_memory(gateway: GatewayProcess, http: httpx.AsyncClient) -> None:
    """Large concurrent bodies over the limit get status 429, and small requests of another tenant succeed."""
    alice, bob = await gateway.make_key('alice'), await gateway.make_key('bob')
    assert await status_of(http, alice) == 400
    begin = gateway.resident_bytes()
    large_requests = asyncio.gather(*(status_of(http, alice) for _ in range(COUNT)))
    statuses, peak = await asyncio.gather(
        send_small_requests(gateway, bob, large_requests), peak_memory_during(gateway, large_requests)
    )
    counts = Counter(await large_requests)
    assert set(counts) == {400, 429}, counts
    assert set(statuses) == {200}
    assert len(statuses) > 1
    assert peak - begin < MAX_GROWTH
    # The gateway frees the last bodies after its response.
    await until(lambda: gateway.resident_bytes() - begin < MAX_GROWTH / 2)
    assert await status_of(http, alice) == 400
