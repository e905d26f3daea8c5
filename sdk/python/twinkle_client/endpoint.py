"""Finds the server address, the API key and the CA certificates: in arguments, the environment or the local stack."""

import os
from dataclasses import dataclass
from pathlib import Path

from twinkle_client.rpc.address import Address
from twinkle_client.rpc.discovery import grpc_address
from twinkle_client.stack.state import StackState, default_state_dir


@dataclass(frozen=True)
class Endpoint:
    """Address of a server and the credentials to call it with."""

    address: str
    """Address in a form that `Address.parse` accepts."""
    api_key: str
    """API key; empty if no key is known."""
    ca: str = ''
    """Path of a PEM file with CA certificates that verify the server. Empty: the system's certificates."""

    @classmethod
    def of_stack(cls, stack: StackState) -> 'Endpoint':
        """Return the endpoint of a local stack."""
        return cls(stack.url, stack.read_api_key(), stack.ca)


def find_endpoint(base_url: str | None, api_key: str | None, ca: str | None = None) -> Endpoint:
    """Return the endpoint from the arguments, the environment variables or the local stack, in this order.

    For `ca`, the local stack takes precedence over the environment. The stack's key and CA are used only with the
    address of the stack.

    Args:
        base_url: Address. None or empty: `TWINKLE_SERVER_URL`, or the local stack.
        api_key: API key. None or empty: `TWINKLE_API_KEY`, or the local stack's key.
        ca: PEM file of CA certificates. None or empty: the local stack's CA if the address or the key is read from the
            stack, otherwise `TWINKLE_CA`.

    Raises:
        ValueError: No address was found, the address is malformed, or `ca` was given for an address without TLS.
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
        raise ValueError('no server address; pass base_url, set TWINKLE_SERVER_URL, or start a stack with `twinkle up`')
    if ca and not Address.parse(address).is_secure:
        raise ValueError(f'ca is given, but {address} does not use TLS; use https://')
    return Endpoint(address, key, authority)


def find_http_endpoint(base_url: str | None, api_key: str | None) -> Endpoint:
    """Return the HTTP endpoint of a gateway from the arguments, `TWINKLE_API_KEY` or the local stack.

    Args:
        base_url: HTTP address. None or empty: the local stack.
        api_key: API key. None or empty: `TWINKLE_API_KEY`, or the local stack's key if the address is the stack's.

    Raises:
        ValueError: No address was found.
    """
    stack = StackState.load(default_state_dir())
    own_url = stack.http_url if stack is not None and stack.is_reachable() else ''
    url = base_url or own_url
    if not url:
        raise ValueError('no server address; pass base_url, or start a stack with `twinkle up`')
    key = api_key or os.environ.get('TWINKLE_API_KEY', '')
    if not key and stack is not None and own_url and _same(url, own_url.rpartition('://')[2]):
        key = stack.read_api_key()
    return Endpoint(url, key)


def find_console_endpoint(http_url: str, state_dir: Path | None = None) -> Endpoint:
    """Return the HTTP address of a gateway with an API key and CA certificates, for the console.

    Args:
        http_url: HTTP address. Empty: `TWINKLE_SERVER_URL`, or the local stack if the variable is not set or
            `state_dir` is given.
        state_dir: State folder of the local stack. None: the default folder.

    Raises:
        ValueError: No address or no key was found, or the local stack serves no HTTP.
    """
    stack = StackState.load(state_dir or default_state_dir())
    stack = stack if stack is not None and stack.is_reachable() else None
    url = http_url or ('' if state_dir is not None else os.environ.get('TWINKLE_SERVER_URL', ''))
    is_local = stack is not None and (not url or _same(url, stack.http_address) or _same(url, stack.address))
    if stack is not None and is_local:
        if not stack.http_url:
            raise ValueError('the stack serves no console, because its http_listen is empty; set it and restart')
        return Endpoint(stack.http_url, os.environ.get('TWINKLE_API_KEY') or stack.read_api_key(), stack.ca)
    if not url:
        raise ValueError('no server address; give --http URL, or start a stack with `twinkle up`')
    key = os.environ.get('TWINKLE_API_KEY', '')
    if not key:
        raise ValueError(f'no API key for {url}; set TWINKLE_API_KEY')
    return Endpoint(url, key, os.environ.get('TWINKLE_CA', ''))


def _same(left: str, right: str) -> bool:
    return left.rpartition('://')[2].rstrip('/').replace('localhost', '127.0.0.1') == right.rpartition('://')[2]
