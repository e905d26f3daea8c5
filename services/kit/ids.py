"""Short, unguessable identifiers that sort by creation time."""

import secrets
import time

_ALPHABET = '0123456789abcdefghjkmnpqrstvwxyz'
"""Crockford's base 32, which has no letters that look like digits."""


def new_id(prefix: str) -> str:
    """Return an id: `<prefix>-<9 characters of time><13 random characters>`.

    Args:
        prefix: Kind of the identified resource, such as 'ad' for an adapter.
    """
    milliseconds = time.time_ns() // 1_000_000
    return f'{prefix}-{_encode(milliseconds, 9)}{_encode(secrets.randbits(65), 13)}'


def _encode(number: int, length: int) -> str:
    return ''.join(_ALPHABET[(number >> (5 * position)) & 31] for position in reversed(range(length)))
