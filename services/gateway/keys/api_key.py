"""API keys: what they allow, when they are good, and how their secrets look."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from services.gateway.errors import KeyEnded

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
    project_id: str = ''
    """Where its sessions belong that name no project; empty: to none."""
    replaces_key_id: str = ''
    """The key that it was made to replace; empty: none."""
    retire_time: datetime | None = None
    """From when on it is worthless because another one replaces it; None: none does."""

    @property
    def lifetime(self) -> timedelta | None:
        """How long it was made for; None: without end."""
        return None if self.expire_time is None else self.expire_time - self.create_time

    def is_valid_at(self, moment: datetime) -> bool:
        """Return whether the key is neither revoked nor retired nor expired at `moment`."""
        ends = [end for end in (self.expire_time, self.retire_time) if end is not None]
        return self.revoke_time is None and all(moment < end for end in ends)

    def replaced_by(self, key_id: str, *, moment: datetime, overlap: timedelta) -> 'Succession':
        """Return the key with an end, and a new one of the same rights, as of `moment`.

        Raises:
            KeyEnded: it is worthless already.
        """
        if not self.is_valid_at(moment):
            raise KeyEnded(self.key_id)
        # One that was replaced before, by a key whose secret got lost, still ends when it was told to.
        retire_time = min(moment + overlap, self.retire_time or datetime.max.replace(tzinfo=UTC))
        heir = replace(
            self,
            key_id=key_id,
            create_time=moment,
            expire_time=None if self.lifetime is None else moment + self.lifetime,
            retire_time=None,
            replaces_key_id=self.key_id,
        )
        return Succession(retired=replace(self, retire_time=retire_time), heir=heir)


@dataclass(frozen=True, kw_only=True)
class Succession:
    """A key and the one that replaces it."""

    retired: ApiKey
    heir: ApiKey


def new_secret(key_id: str) -> str:
    """Return a secret for the key; it shows the key's id, so that its owner can tell which one it is."""
    return f'{SECRET_PREFIX}{key_id}-{secrets.token_hex(SECRET_RANDOM_BYTES)}'


def every_scope() -> frozenset[Scope]:
    """Return all scopes."""
    return frozenset(Scope)


def scope_names(scopes: Iterable[Scope]) -> list[str]:
    """Return the scopes' names, sorted."""
    return sorted(scope.value for scope in scopes)
