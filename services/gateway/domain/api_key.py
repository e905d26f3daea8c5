"""API keys: what they allow, when they are good, and how their secrets look."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

SECRET_PREFIX = 'tml-'  # noqa: S105 (the public part)
"""What every secret begins with, so that people and secret scanners know one when they see it."""
SECRET_RANDOM_BYTES = 32
"""Chance in a secret, in bytes: enough that a plain keyed hash of it cannot be searched."""
MIN_SECRET_LENGTH = 20
"""Fewest characters of a secret that somebody else chose."""


class Scope(StrEnum):
    """What a key may do."""

    TRAIN = 'train'
    SAMPLE = 'sample'
    DATA = 'data'
    OPERATOR = 'operator'
    ADMIN = 'admin'


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key without its secret."""

    key_id: str
    """The part that may be shown."""
    tenant_id: str
    """The tenant it speaks for."""
    scopes: frozenset[Scope]
    """What it may do."""
    display_name: str
    """For people to read."""
    create_time: datetime
    """UTC."""
    expire_time: datetime | None = None
    """From when on it is worthless; None: never."""
    revoke_time: datetime | None = None
    """When it was revoked; None: it was not."""

    def is_valid_at(self, moment: datetime) -> bool:
        """Return whether the key is neither revoked nor expired at `moment`."""
        return self.revoke_time is None and (self.expire_time is None or moment < self.expire_time)


def new_secret(key_id: str) -> str:
    """Return a secret for the key; it shows the key's id, so that its owner can tell which one it is."""
    return f'{SECRET_PREFIX}{key_id}-{secrets.token_hex(SECRET_RANDOM_BYTES)}'


def every_scope() -> frozenset[Scope]:
    """Return all scopes."""
    return frozenset(Scope)


def scope_names(scopes: Iterable[Scope]) -> list[str]:
    """Return the scopes' names, sorted."""
    return sorted(scope.value for scope in scopes)
