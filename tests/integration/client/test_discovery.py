"""A client finds a gateway's gRPC port from the gateway's HTTP address."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from fixtures.fake_gateway import API_KEY, FakeGateway
from fixtures.running_gateway import ADMIN_KEY, running_gateway
from twinkle_client import TwinkleClient
from twinkle_client.rpc.discovery import grpc_address

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def test_client_finds_the_grpc_port_from_the_http_address(tmp_path: Path) -> None:
    """The client sends its calls to the gRPC port that the HTTP server's response contains."""
    async with running_gateway(tmp_path, http_listen='127.0.0.1:0') as gateway:
        client = await asyncio.to_thread(TwinkleClient, f'http://{gateway.http_address}', ADMIN_KEY)
        try:
            info = await asyncio.to_thread(client.get_server_info)
        finally:
            await asyncio.to_thread(client.close)
    assert client.base_url == f'grpc://{gateway.address}'
    assert len(info.services) > 0


async def test_grpc_address_is_used_unchanged(gateway: FakeGateway) -> None:
    """The address of a server that does not serve HTTP/1.1 is used unchanged."""
    address = f'http://127.0.0.1:{gateway.port}'
    assert await asyncio.to_thread(grpc_address, address) == address
    client = await asyncio.to_thread(TwinkleClient, address, API_KEY)
    await asyncio.to_thread(client.close)


@pytest.mark.parametrize(
    'body',
    [
        b'{"grpc_port": "1"}',
        b'{"grpc_port": 0}',
        b'{"grpc_port": 65536}',
        b'{"grpc_port": true}',
        b'{"grpc_port": 9}',
        b'[1]',
        b'no JSON',
        b'x' * 100_000,
        b'[' * 4_000,
        b'{}',
    ],
    ids=['text', 'zero', 'large', 'boolean', 'unreachable', 'list', 'text-body', 'long', 'deep', 'none'],
)
async def test_address_of_another_server_is_used_unchanged(body: bytes) -> None:
    """A response without the number of a reachable gRPC port leaves the address unchanged."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'\r\n\r\n')
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s' % (len(body), body))
        await writer.drain()

    async with _serving(answer, '127.0.0.1', connections=1) as port:
        address = f'http://127.0.0.1:{port}'
        assert await asyncio.to_thread(grpc_address, address) == address


async def test_silent_server_is_queried_until_the_timeout() -> None:
    """If the server does not respond, the address is used unchanged after the timeout."""

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with _serving(stay_silent, '127.0.0.1', connections=1) as port:
        address = f'http://127.0.0.1:{port}'
        assert await asyncio.to_thread(grpc_address, address, timeout=timedelta(milliseconds=50)) == address


async def test_endless_response_is_read_until_the_timeout() -> None:
    """The timeout applies to the whole response, not to each of its parts."""

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'\r\n\r\n')
        disconnected = asyncio.create_task(reader.read())
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 4000\r\n\r\n')
        while not disconnected.done():
            writer.write(b' ')
            await asyncio.wait([disconnected], timeout=0.02)

    async with _serving(trickle, '127.0.0.1', connections=1) as port, asyncio.timeout(10):
        address = f'http://127.0.0.1:{port}'
        assert await asyncio.to_thread(grpc_address, address, timeout=timedelta(milliseconds=100)) == address


async def test_ipv6_address_is_supported() -> None:
    """An IPv6 address keeps its brackets, and the response is read up to its content length."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info('sockname')[1]
        if f'Host: [::1]:{port}'.encode() in await reader.read(1 << 12):
            body = b'{"grpc_port": %d}' % port
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s' % (len(body), body))
            await reader.read()

    async with _serving(answer, '::1', connections=2) as port:
        address = f'http://[::1]:{port}'
        assert await asyncio.to_thread(grpc_address, f'{address}/api/v1') == address


@asynccontextmanager
async def _serving(answer: Handler, host: str, *, connections: int) -> AsyncIterator[int]:
    """Serve on a free port, and wait at the end until the given number of connections is closed."""
    closed = asyncio.Semaphore(0)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer)
        writer.close()
        await writer.wait_closed()
        closed.release()

    async with await asyncio.start_server(handle, host, 0) as server:
        yield server.sockets[0].getsockname()[1]
        for _ in range(connections):
            await closed.acquire()


@pytest.mark.parametrize('address', ['127.0.0.1:9', 'grpc://127.0.0.1:9', 'http://127.0.0.1:9'])
def test_missing_server_does_not_fail_the_lookup(address: str) -> None:
    """The address of an unreachable server is used unchanged, so a client can be created before its server."""
    assert grpc_address(address) == address
