"""Discovery of the gRPC port from the address of the gateway's HTTP APIs."""

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

_TIMEOUT = timedelta(seconds=2)
_RESPONSE_LIMIT_BYTES = 1 << 14
"""Largest response that is read, including its headers. The response of a gateway has a few hundred bytes."""


def grpc_address(text: str, *, timeout: timedelta = _TIMEOUT) -> str:
    """Return the gRPC address for the address that a user gave.

    Users of both APIs need only one address. `http://host:port` may be the port of the gateway's HTTP APIs, whose
    `/healthz` reports the gRPC port on the same host. The given address is returned unchanged if it is not a
    gateway's HTTP port, the server does not respond, or the reported port cannot be reached, for example behind a
    proxy. Addresses of other schemes are returned unchanged without a request.

    Args:
        text: Address in a form that `Address.parse` accepts.
        timeout: Limit for all requests together, without the DNS lookup.

    Raises:
        ValueError: `text` is not an address.
    """
    address = Address.parse(text)
    if urlsplit(text).scheme != 'http':
        return text
    end = time.monotonic() + timeout.total_seconds()
    try:
        port = _advertised_port(address, end)
        if port is None:
            return text
        _connect(address.host, port, end).close()
    # A port that serves gRPC only does not respond to HTTP/1.1, and other servers may return any response.
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return text
    return f'http://{Address(address.host, port).target}'


def _advertised_port(address: Address, end: float) -> int | None:
    """Return the gRPC port in a gateway's health report, or None."""
    with _connect(address.host, address.port, end) as connection:
        connection.sendall(f'GET /healthz HTTP/1.1\r\nHost: {address.target}\r\nConnection: close\r\n\r\n'.encode())
        response = http.client.HTTPResponse(cast(socket.socket, _BoundedResponse(connection, end)), method='GET')
        response.begin()
        health: Any = json.loads(response.read(_RESPONSE_LIMIT_BYTES))
    port = cast(Mapping[str, Any], health).get('grpc_port') if isinstance(health, dict) else None
    return port if type(port) is int and 0 < port < 1 << 16 else None


class _BoundedResponse(io.RawIOBase):
    """Bytes from a server, limited in size and in total time even if the server sends slowly."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection, self._end, self._remaining = connection, end, _RESPONSE_LIMIT_BYTES

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a buffered reader; `http.client` calls this on its socket."""
        del mode
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read into the buffer; return 0 once the size limit is reached."""
        self._connection.settimeout(_seconds_until(self._end))
        part = self._connection.recv(min(len(buffer), self._remaining)) if self._remaining else b''
        buffer[: len(part)] = part
        self._remaining -= len(part)
        return len(part)


def _connect(host: str, port: int, end: float) -> socket.socket:
    return socket.create_connection((host, port), timeout=_seconds_until(end))


def _seconds_until(end: float) -> float:
    remaining = end - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
