"""Which server to call, and with which key, when the program does not say."""

import os

from twinkle_client.stack.state import StackState, default_state_dir


def find_endpoint(base_url: str | None, api_key: str | None) -> tuple[str, str]:
    """Return address and key: what is given, else the environment, else the local stack.

    The local stack's key is used for its own address only.

    Args:
        base_url: None or empty: look for it.
        api_key: None or empty: look for it.

    Raises:
        ValueError: there is no address anywhere.
    """
    address = base_url or os.environ.get('TWINKLE_SERVER_URL', '')
    key = api_key or os.environ.get('TWINKLE_API_KEY', '')
    if address and key:
        return address, key
    stack = StackState.load(default_state_dir())
    if stack is None or not stack.is_running():
        if not address:
            raise ValueError(
                'no server address: give base_url, set TWINKLE_SERVER_URL, or start a stack with `twinkle up`'
            )
        return address, key
    if not address or _same(address, stack.address):
        return stack.address, key or stack.read_api_key()
    return address, key


def _same(left: str, right: str) -> bool:
    return left.rpartition('://')[2].rstrip('/').replace('localhost', '127.0.0.1') == right.rpartition('://')[2]
