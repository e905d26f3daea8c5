"""One address for both APIs: a client that is given where HTTP is served finds gRPC."""

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

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def test_a_client_finds_grpc_behind_the_address_of_http(tmp_path: Path) -> None:
    """The server answers its calls, though they went to another port than was given."""
    async with running_gateway(tmp_path, http_listen='127.0.0.1:0') as gateway:
        client = await asyncio.to_thread(TwinkleClient, f'http://{gateway.http_address}', ADMIN_KEY)
        try:
            info = await asyncio.to_thread(client.get_server_info)
        finally:
            await asyncio.to_thread(client.close)
    assert client.base_url == f'grpc://{gateway.address}'
    assert len(info.services) > 0


async def test_an_address_of_grpc_is_called_as_it_is(gateway: FakeGateway) -> None:
    """What speaks no HTTP/1.1 is no reason to look further."""
    given = f'http://127.0.0.1:{gateway.port}'
    assert await asyncio.to_thread(grpc_address, given) == given
    client = await asyncio.to_thread(TwinkleClient, given, API_KEY)
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
    ids=['text', 'zero', 'large', 'truth', 'unreachable', 'list', 'text-body', 'long', 'deep', 'none'],
)
async def test_other_servers_are_called_as_they_were_written(body: bytes) -> None:
    """What answers, but tells no port of gRPC, is left to gRPC to complain about."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'\r\n\r\n')
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s' % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, '127.0.0.1', 0) as server:
        given = f'http://127.0.0.1:{server.sockets[0].getsockname()[1]}'
        assert await asyncio.to_thread(grpc_address, given) == given


async def test_a_server_that_says_nothing_is_waited_for_no_longer_than_told() -> None:
    """The call goes on with the address as it was written."""

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(keep_silent, '127.0.0.1', 0) as server:
        given = f'http://127.0.0.1:{server.sockets[0].getsockname()[1]}'
        assert await asyncio.to_thread(grpc_address, given, timeout=timedelta(milliseconds=50)) == given


async def test_a_server_that_goes_on_and_on_is_waited_for_no_longer_than_told() -> None:
    """However often something of its answer comes, the whole of it has one deadline."""

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'\r\n\r\n')
        leaving = asyncio.create_task(reader.read())
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 4000\r\n\r\n')
        while not leaving.done():
            writer.write(b' ')
            await asyncio.wait([leaving], timeout=0.02)

    async with _serving(trickle, '127.0.0.1', connections=1) as port, asyncio.timeout(10):
        given = f'http://127.0.0.1:{port}'
        assert await asyncio.to_thread(grpc_address, given, timeout=timedelta(milliseconds=100)) == given


async def test_a_server_at_an_address_of_version_six_is_found_too() -> None:
    """The address keeps its brackets, and an answer is over where its length says so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info('sockname')[1]
        if f'Host: [::1]:{port}'.encode() in await reader.read(1 << 12):
            body = b'{"grpc_port": %d}' % port
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s' % (len(body), body))
            await reader.read()

    async with _serving(answer, '::1', connections=2) as port:
        told = f'http://[::1]:{port}'
        assert await asyncio.to_thread(grpc_address, f'{told}/api/v1') == told


@asynccontextmanager
async def _serving(answer: Answer, host: str, *, connections: int) -> AsyncIterator[int]:
    """Answer so many connections at a free port, and wait for the end of all of them."""
    ended = asyncio.Semaphore(0)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer)
        writer.close()
        await writer.wait_closed()
        ended.release()

    async with await asyncio.start_server(handle, host, 0) as server:
        yield server.sockets[0].getsockname()[1]
        for _ in range(connections):
            await ended.acquire()


@pytest.mark.parametrize('given', ['127.0.0.1:9', 'grpc://127.0.0.1:9', 'http://127.0.0.1:9'])
def test_nobody_at_the_address_is_found_out_by_the_call(given: str) -> None:
    """Making a client does not need its server."""
    assert grpc_address(given) == given
