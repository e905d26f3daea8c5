"""Which server to call, with which key, and whose certificates to believe, when the program does not say."""

import os
from dataclasses import dataclass

from twinkle_client.rpc.address import Address
from twinkle_client.rpc.discovery import grpc_address
from twinkle_client.stack.state import StackState, default_state_dir


@dataclass(frozen=True)
class Endpoint:
    """A server, as a client calls it."""

    address: str
    """As people write it; see `Address.parse`."""
    api_key: str
    """Empty: none is known."""
    ca: str = ''
    """PEM file of the authorities that its certificate is checked against. Empty: this machine's."""

    @classmethod
    def of_stack(cls, stack: StackState) -> 'Endpoint':
        """Return where a stack of this machine is called, with its own key."""
        return cls(stack.url, stack.read_api_key(), stack.ca)


def find_endpoint(base_url: str | None, api_key: str | None, ca: str | None = None) -> Endpoint:
    """Return what is given, else the environment's, else the local stack's.

    The local stack's key and authority are used for its own address only.

    Args:
        base_url: None or empty: look for it.
        api_key: None or empty: look for it.
        ca: None or empty: look for it; only ever for addresses with TLS.

    Raises:
        ValueError: there is no address anywhere, or an authority is given for one without TLS.
    """
    address = base_url or os.environ.get('TWINKLE_SERVER_URL', '')
    address = grpc_address(address) if address else ''
    key = api_key or os.environ.get('TWINKLE_API_KEY', '')
    authority = ca or os.environ.get('TWINKLE_CA', '')
    if not (address and key):
        stack = StackState.load(default_state_dir())
        if stack is not None and stack.is_reachable() and (not address or _same(address, stack.address)):
            local = Endpoint.of_stack(stack)
            address, key, authority = local.address, key or local.api_key, ca or local.ca
    if not address:
        raise ValueError('no server address: give base_url, set TWINKLE_SERVER_URL, or start a stack with `twinkle up`')
    if ca and not Address.parse(address).is_secure:
        raise ValueError(f'ca is given, but {address} is called without TLS; write https://')
    return Endpoint(address, key, authority)


def find_http_endpoint(base_url: str | None, api_key: str | None) -> Endpoint:
    """Return where a gateway is called over HTTP, and with which key: what is given, else the local stack's.

    `TWINKLE_API_KEY` comes before the local stack's key, which is used for its own address only.

    Args:
        base_url: None or empty: the local stack's.
        api_key: None or empty: look for it.

    Raises:
        ValueError: there is no address anywhere.
    """
    stack = StackState.load(default_state_dir())
    own_url = stack.http_url if stack is not None and stack.is_reachable() else ''
    url = base_url or own_url
    if not url:
        raise ValueError('no server address: give base_url, or start a stack with `twinkle up`')
    key = api_key or os.environ.get('TWINKLE_API_KEY', '')
    if not key and stack is not None and own_url and _same(url, own_url.rpartition('://')[2]):
        key = stack.read_api_key()
    return Endpoint(url, key)


def _same(left: str, right: str) -> bool:
    return left.rpartition('://')[2].rstrip('/').replace('localhost', '127.0.0.1') == right.rpartition('://')[2]
