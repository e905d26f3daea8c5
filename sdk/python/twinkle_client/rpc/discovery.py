"""Where gRPC is served, for programs that name the address of the HTTP APIs."""

import http.client
import json
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from twinkle_client.rpc.address import Address

_PATIENCE = timedelta(seconds=2)
_MOST_BYTES = 1 << 12
"""Of an answer that is read; a gateway's takes less than a hundred."""


def grpc_address(text: str, *, patience: timedelta = _PATIENCE) -> str:
    """Return the address to call, for one that people wrote.

    One address is all that a program for both APIs knows. `http://host:port` may be where the gateway serves HTTP: its
    `/healthz` tells the port of gRPC on the same host. Whatever else answers there, or nobody, is called as it was
    written; other schemes are never asked.

    Args:
        text: as `Address.parse` reads it.
        patience: how long an answer is waited for.

    Raises:
        ValueError: `text` is no address.
    """
    address = Address.parse(text)
    if urlsplit(text).scheme != 'http':
        return text
    connection = http.client.HTTPConnection(address.host, address.port, timeout=patience.total_seconds())
    try:
        connection.request('GET', '/healthz', headers={'Connection': 'close'})
        health: Any = json.loads(connection.getresponse().read(_MOST_BYTES))
    # What speaks gRPC only is no HTTP/1.1 at all, and what is no gateway says anything.
    except (OSError, http.client.HTTPException, ValueError):
        return text
    finally:
        connection.close()
    port = health.get('grpc_port') if isinstance(health, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType] (JSON)
    return f'http://{Address(address.host, port).target}' if isinstance(port, int) and 0 < port < 1 << 16 else text
