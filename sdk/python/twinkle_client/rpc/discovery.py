"""Where gRPC is served, for programs that name the address of the HTTP APIs."""

import http.client
import io
import json
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

from twinkle_client.rpc.address import Address

_PATIENCE = timedelta(seconds=2)
_MOST_BYTES = 1 << 14
"""Of an answer that is read, its headers included; a gateway's takes a few hundred."""


def grpc_address(text: str, *, patience: timedelta = _PATIENCE) -> str:
    """Return the address to call, for one that people wrote.

    One address is all that a program for both APIs knows. `http://host:port` may be where the gateway serves HTTP: its
    `/healthz` tells the port of gRPC on the same host. Whatever else answers there, or nobody, is called as it was
    written, and so is a gateway whose port cannot be reached from here, as behind a proxy; other schemes are never
    asked.

    Args:
        text: as `Address.parse` reads it.
        patience: how long all this may take, beside looking up the host's name.

    Raises:
        ValueError: `text` is no address.
    """
    address = Address.parse(text)
    if urlsplit(text).scheme != 'http':
        return text
    end = time.monotonic() + patience.total_seconds()
    try:
        port = _told_port(address, end)
        if port is None:
            return text
        _connected(address.host, port, end).close()
    # What speaks gRPC only is no HTTP/1.1 at all, and what is no gateway says anything.
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return text
    return f'http://{Address(address.host, port).target}'


def _told_port(address: Address, end: float) -> int | None:
    """Return the port of gRPC that a gateway tells; None where none is told."""
    with _connected(address.host, address.port, end) as connection:
        connection.sendall(f'GET /healthz HTTP/1.1\r\nHost: {address.target}\r\nConnection: close\r\n\r\n'.encode())
        answer = http.client.HTTPResponse(cast(socket.socket, _Answer(connection, end)), method='GET')
        answer.begin()
        health: Any = json.loads(answer.read(_MOST_BYTES))
    port = cast(Mapping[str, Any], health).get('grpc_port') if isinstance(health, dict) else None
    return port if type(port) is int and 0 < port < 1 << 16 else None


class _Answer(io.RawIOBase):
    """What a server sends, up to a size and a time, however slowly it sends."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection, self._end, self._room = connection, end, _MOST_BYTES

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return it as `http.client` asks a socket for it."""
        del mode
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer with what has come; nothing more once there is no room."""
        self._connection.settimeout(_seconds_until(self._end))
        part = self._connection.recv(min(len(buffer), self._room)) if self._room else b''
        buffer[: len(part)] = part
        self._room -= len(part)
        return len(part)


def _connected(host: str, port: int, end: float) -> socket.socket:
    return socket.create_connection((host, port), timeout=_seconds_until(end))


def _seconds_until(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
