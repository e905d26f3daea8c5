"""Identifiers: short, unguessable, sortable by the time they were made."""

import secrets
import time

_ALPHABET = '0123456789abcdefghjkmnpqrstvwxyz'
"""Crockford's base 32: no letter that reads like a digit."""


def new_id(prefix: str) -> str:
    """Return `<prefix>-<9 characters of time><13 of chance>`.

    Args:
        prefix: says what is identified, such as 'ad' for an adapter.
    """
    milliseconds = time.time_ns() // 1_000_000
    return f'{prefix}-{_encode(milliseconds, 9)}{_encode(secrets.randbits(65), 13)}'


def _encode(number: int, length: int) -> str:
    return ''.join(_ALPHABET[(number >> (5 * place)) & 31] for place in reversed(range(length)))
