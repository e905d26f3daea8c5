"""The number of connections is limited, and idle connections are closed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from fixtures.fake_samplers import until
from twinkle_services.gateway.http.server import BoundedConnection

GET = b'GET / HTTP/1.1\r\nhost: x\r\n\r\n'
LARGE = 1 << 26
"""Size of the large response in bytes."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Send a large response for `/large`, two bytes for other paths, and nothing for `/waiting` before a disconnect."""
    while scope['path'] == '/waiting' and (await receive())['type'] != 'http.disconnect':
        pass
    size = LARGE if scope['path'] == '/large' else 2
    head = [(b'content-length', str(size).encode())]
    await send({'type': 'http.response.start', 'status': 200, 'headers': head})
    for _ in range(size // (1 << 18)):
        await send({'type': 'http.response.body', 'body': bytes(1 << 18), 'more_body': True})
    await send({'type': 'http.response.body', 'body': b'ok' if size == 2 else b''})


class Server:
    """A running server with its port and the state of its connections."""

    def __init__(self, port: int, state: ServerState) -> None:
        self.port = port
        self.state = state

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection, and return its reader and writer."""
        return await asyncio.open_connection('127.0.0.1', self.port, limit=1 << 12)


@asynccontextmanager
async def serving(**bounds: Any) -> AsyncIterator[Server]:
    """Serve the app until the block ends."""
    config = uvicorn.Config(app, lifespan='off', log_config=None, timeout_keep_alive=0)
    config.load()
    state = ServerState()

    def connect() -> asyncio.Protocol:
        return BoundedConnection(config=config, server_state=state, app_state={}, **{'limit': 4, **bounds})

    server = await asyncio.get_running_loop().create_server(connect, '127.0.0.1', 0)
    try:
        yield Server(server.sockets[0].getsockname()[1], state)
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Read until the connection closes; return whether no data arrived."""
    try:
        return not await reader.read()
    except ConnectionError:
        return True


async def test_connection_over_the_limit_is_closed() -> None:
    """A connection over the limit is closed; when another connection has closed, a new connection is served."""
    async with serving(limit=2, head_seconds=60) as server:
        (first, to_first), (_, second) = await server.connect(), await server.connect()
        third, to_third = await server.connect()
        assert await is_closed(third)
        to_third.close()
        to_first.write(GET)
        assert (await first.readline()).startswith(b'HTTP/1.1 200')
        second.close()
        await until(lambda: len(server.state.connections) == 1)
        fourth, to_fourth = await server.connect()
        to_fourth.write(GET)
        assert (await fourth.readline()).startswith(b'HTTP/1.1 200')
        for writer in (to_first, to_fourth):
            writer.close()


async def test_connection_without_a_complete_head_is_closed() -> None:
    """A connection without a complete request head is closed, for the first request and for later requests."""
    async with serving(head_seconds=0.05) as server:
        silent, to_silent = await server.connect()
        assert await is_closed(silent)
        partial, to_partial = await server.connect()
        to_partial.write(GET[:10])
        assert await is_closed(partial)
        later, to_later = await server.connect()
        to_later.write(GET)
        await later.readuntil(b'ok')
        to_later.write(GET[:10])
        assert await is_closed(later)
        for writer in (to_silent, to_partial, to_later):
            writer.close()


async def test_connection_of_a_client_that_does_not_read_is_closed() -> None:
    """A connection whose client does not read is closed; a client that reads gets the complete response."""
    async with serving(unread_seconds=0.2) as server:
        reader, writer = await server.connect()
        writer.write(GET.replace(b'/ ', b'/large '))
        await reader.readline()
        await until(lambda: not server.state.connections)
        writer.close()
        fast, to_fast = await server.connect()
        to_fast.write(GET.replace(b'/ ', b'/large '))
        await fast.readuntil(b'\r\n\r\n')
        assert len(await fast.readexactly(LARGE)) == LARGE
        to_fast.close()


async def test_disconnect_is_detected_after_a_second_request() -> None:
    """If a client sends two requests and disconnects, the first request ends, although it is still being processed."""
    async with serving() as server:
        _, writer = await server.connect()
        writer.write(GET.replace(b'/ ', b'/waiting ') + GET)
        await until(lambda: bool(server.state.tasks))
        writer.write(GET)
        await writer.drain()
        writer.close()
        await until(lambda: not server.state.connections and not server.state.tasks)


async def test_requests_sent_at_once_are_answered_in_order() -> None:
    """Requests that arrive before the response to an earlier request are served in order."""
    async with serving() as server:
        reader, writer = await server.connect()
        writer.write(GET.replace(b'/ ', b'/large ') + GET)
        writer.write(GET)
        await reader.readuntil(b'\r\n\r\n')
        await reader.readexactly(LARGE)
        for _ in range(2):
            assert (await reader.readuntil(b'\r\n\r\nok')).startswith(b'HTTP/1.1 200')
        writer.close()


async def test_connection_of_a_client_that_sends_too_early_is_closed() -> None:
    """A connection whose client sends much more than one request before a response is closed."""
    async with serving() as server:
        reader, writer = await server.connect()
        writer.write(GET.replace(b'/ ', b'/waiting ') + bytes(1 << 20))
        assert await is_closed(reader)
        await until(lambda: not server.state.tasks)
        writer.close()
