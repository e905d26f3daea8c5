"""Tells which addresses are this machine's own."""

import asyncio
import socket
from typing import Any


async def is_this_host(host: str) -> bool:
    """Return whether a host name or address means this machine; one that cannot be resolved does not."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[Any, ...]) -> bool:
    # Only an address of the machine itself can be bound; a datagram socket disturbs nobody.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
