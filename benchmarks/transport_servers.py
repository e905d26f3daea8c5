"""Plain HTTP and ZeroMQ servers for comparison; `python -m benchmarks.transport_servers http|zmq MIB`.

MIB is the size of the served bytes. Each server prints its address and serves until it is terminated. The servers have
no checksums and no versions, so they show only the throughput of their transport.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
import zmq
import zmq.asyncio

CHUNK_BYTES = 1 << 20
ZMQ_WINDOW = 8
"""Number of chunks in flight. The reader requests one more chunk for each received chunk."""


def main() -> None:
    """Start the server that the command line names."""
    kind, size_mib = sys.argv[1], int(sys.argv[2])
    payload = random_bytes(size_mib << 20)
    if kind == 'http':
        serve_http(payload)
    else:
        asyncio.run(serve_zmq(payload))


def random_bytes(count: int) -> bytes:
    """Return `count` bytes, which repeat one pseudo-random block."""
    block = bytes((index * 2_654_435_761 >> 7) & 0xFF for index in range(CHUNK_BYTES))
    return (block * (count // CHUNK_BYTES + 1))[:count]


def serve_http(payload: bytes) -> None:
    """Serve the bytes as one response in chunks."""
    view = memoryview(payload)

    async def app(
        scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        del receive
        if scope['type'] != 'http':
            return
        await send({'type': 'http.response.start', 'status': 200, 'headers': [(b'content-type', b'application/x')]})
        async for chunk in chunks(view):
            await send({'type': 'http.response.body', 'body': chunk, 'more_body': True})
        await send({'type': 'http.response.body', 'body': b''})

    listener = socket.create_server(('127.0.0.1', 0))
    print_address('127.0.0.1', listener.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(app, log_level='error', lifespan='off'))
    asyncio.run(server.serve(sockets=[listener]))


async def chunks(view: memoryview) -> AsyncIterator[bytes]:
    """Yield the bytes in chunks, and copy each chunk, as a read from a store does."""
    for begin in range(0, len(view), CHUNK_BYTES):
        yield bytes(view[begin : begin + CHUNK_BYTES])


async def serve_zmq(payload: bytes) -> None:
    """Serve the bytes to each reader: `ZMQ_WINDOW` chunks for its first request, and one for each later request."""
    view = memoryview(payload)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port('tcp://127.0.0.1')
    print_address('127.0.0.1', port)
    offsets: dict[bytes, int] = {}
    while True:
        reader, command = await router.recv_multipart()
        if command == b'begin':
            offsets[reader] = 0
        for _ in range(ZMQ_WINDOW if command == b'begin' else 1):
            begin = offsets[reader]
            if begin < len(view):
                offsets[reader] = begin + CHUNK_BYTES
                await router.send_multipart([reader, view[begin : begin + CHUNK_BYTES]], copy=False)


def print_address(host: str, port: int) -> None:
    """Print the address of the server, and flush it, so that the parent process can read it."""
    sys.stdout.write(f'{host}:{port}\n')
    sys.stdout.flush()


if __name__ == '__main__':
    main()
