"""Tenants, projects and API keys, and the rules for a key's lifetime and rotation."""

import secrets
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from twinkle_services.gateway.credentials import SECRET_PREFIX, Scope
from twinkle_services.gateway.errors import KeyEnded
from twinkle_services.kit.caller import Caller

DEFAULT_TENANT = 'default'
"""Tenant that every deployment has, and that owns the bootstrap key."""
DEFAULT_OVERLAP = timedelta(days=1)
"""Time for which a replaced key stays valid unless the request sets a different time."""
SECRET_RANDOM_BYTES = 32
"""Number of random bytes in a generated secret. They make brute force infeasible, even against a fast keyed hash."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Owner of sessions, runs, checkpoints and keys; isolated from all other tenants."""

    tenant_id: str
    """1 to 64 characters: lower-case letters, digits and '-'."""
    display_name: str
    create_time: datetime
    """UTC."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """Named group of a tenant's sessions and their runs; it provides no isolation."""

    tenant_id: str
    project_id: str
    """1 to 64 characters: lower-case letters, digits and '-'; unique within the tenant."""
    display_name: str
    create_time: datetime
    """UTC."""


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """API key without its secret."""

    key_id: str
    """Public id, which is also part of the secret."""
    tenant_id: str
    """Tenant that the key acts for."""
    scopes: frozenset[Scope]
    display_name: str
    create_time: datetime
    """UTC."""
    expire_time: datetime | None = None
    """Time from which the key is invalid; None if it never expires."""
    revoke_time: datetime | None = None
    """Time at which the key was revoked; None if it is not revoked."""
    project_id: str = ''
    """Default project of sessions created with the key; empty if absent."""
    replaces_key_id: str = ''
    """Key that this one replaces; empty if absent."""
    retire_time: datetime | None = None
    """Time from which the key is invalid because another key replaced it; None if it was not replaced."""

    @property
    def caller(self) -> Caller:
        """Caller that the key authenticates."""
        scopes = frozenset(scope.value for scope in self.scopes)
        return Caller(tenant_id=self.tenant_id, key_id=self.key_id, project_id=self.project_id, scopes=scopes)

    @property
    def lifetime(self) -> timedelta | None:
        """Time from creation to expiry; None if the key never expires."""
        return None if self.expire_time is None else self.expire_time - self.create_time

    def is_valid_at(self, moment: datetime) -> bool:
        """Return whether the key is not revoked and, at `moment`, neither retired nor expired."""
        end_times = [end for end in (self.expire_time, self.retire_time) if end is not None]
        return self.revoke_time is None and all(moment < end for end in end_times)

    def rotated(self, key_id: str, *, moment: datetime, overlap: timedelta) -> 'Rotation':
        """Return the key with a retire time, and a new key `key_id` with the same rights and lifetime.

        Raises:
            KeyEnded: the key is no longer valid at `moment`.
        """
        if not self.is_valid_at(moment):
            raise KeyEnded(self.key_id)
        # If the first response is lost and the rotation is repeated, the old key must not stay valid for longer.
        retire_time = min(moment + overlap, self.retire_time or datetime.max.replace(tzinfo=UTC))
        successor = replace(
            self,
            key_id=key_id,
            create_time=moment,
            expire_time=None if self.lifetime is None else moment + self.lifetime,
            retire_time=None,
            replaces_key_id=self.key_id,
        )
        return Rotation(retired=replace(self, retire_time=retire_time), successor=successor)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A key and the key that replaces it."""

    retired: ApiKey
    successor: ApiKey


@dataclass(frozen=True, kw_only=True)
class KeyRequest:
    """Request for a new key."""

    tenant_id: str
    scopes: frozenset[Scope]
    display_name: str
    ttl: timedelta | None
    """Lifetime of the key; None for a key that never expires."""
    project_id: str = ''
    """Default project of sessions created with the key; empty if absent."""


@dataclass(frozen=True, kw_only=True)
class IssuedKey:
    """A new key with its secret, which cannot be read again."""

    key: ApiKey
    secret: str = field(repr=False)
    replaced: ApiKey | None = None
    """Key that the new key replaces; None if it replaces no key."""


def new_secret(key_id: str) -> str:
    """Return a random secret that contains the key's id, so that its owner can identify the key."""
    return f'{SECRET_PREFIX}{key_id}-{secrets.token_hex(SECRET_RANDOM_BYTES)}'
