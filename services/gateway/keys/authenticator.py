"""Authenticates calls: maps a secret to its API key, and the key to a caller with the scope that the method requires.

Authentication runs on every call, so verified keys are cached for a short time.
"""

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from twinkle_services.gateway.credentials import Access, requirement_of
from twinkle_services.gateway.keys.pepper import PepperedHasher
from twinkle_services.gateway.keys.rules import ApiKey
from twinkle_services.gateway.keys.sql import SqlKeyStore
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import CredentialsInvalid, CredentialsMissing, NotBuiltYet, ScopeMissing
from twinkle_services.kit.rpc.auth import Authenticator, bearer_token

MAX_CACHED = 4096
"""Capacity of each cache. Stored and unknown keys have separate caches, so that guessed keys evict no stored key."""
MAX_LOOKUPS = 64
"""Maximum number of concurrent lookups. Further lookups wait, so that guessed keys do not overload the store."""


@dataclass(frozen=True)
class _CachedKey:
    key: ApiKey | None
    stale_at: float
    """Time on the monotonic clock at which the entry expires."""


class KeyVerifier:
    """Verifies secrets. Unknown secrets and secrets of revoked, expired or retired keys raise the same error.

    Results are cached by digest for `memory`. A key revoked at another gateway stays valid here at most that long.
    """

    def __init__(self, keys: SqlKeyStore, *, hasher: PepperedHasher, clock: Clock, memory: timedelta) -> None:
        self._keys = keys
        self._hasher = hasher
        self._clock = clock
        self.memory = memory
        """Time for which results are cached."""
        self._known: OrderedDict[bytes, _CachedKey] = OrderedDict()
        self._unknown: OrderedDict[bytes, _CachedKey] = OrderedDict()
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._epoch = 0

    def digest(self, secret: str) -> bytes:
        """Return the digest under which a secret's key is stored."""
        return self._hasher.digest(secret)

    async def verify(self, secret: str) -> ApiKey:
        """Return the valid key that a secret belongs to.

        Raises:
            CredentialsInvalid: no valid key has this secret.
        """
        digest = self._hasher.digest(secret)
        cached = self._known.get(digest) or self._unknown.get(digest)
        if cached is None or cached.stale_at <= self._clock.monotonic():
            cached = await self._look_up(digest)
        if cached.key is None or not cached.key.is_valid_at(self._clock.now()):
            raise CredentialsInvalid()
        return cached.key

    def clear(self) -> None:
        """Clear the caches. The results of lookups in progress are not cached."""
        self._epoch += 1
        self._known.clear()
        self._unknown.clear()

    async def _look_up(self, digest: bytes) -> _CachedKey:
        async with self._lookups:
            epoch = self._epoch
            key = await self._keys.find(digest)
        found = _CachedKey(key, self._clock.monotonic() + self.memory.total_seconds())
        if epoch == self._epoch:
            cache = self._unknown if key is None else self._known
            self._unknown.pop(digest, None)
            cache[digest] = found
            cache.move_to_end(digest)
            if len(cache) > MAX_CACHED:
                cache.popitem(last=False)
        return found


class KeyAuthenticator:
    """Authenticates clients by an API key, which they send as a bearer token; ignores all other credentials."""

    def __init__(self, verifier: KeyVerifier) -> None:
        self._verifier = verifier

    @property
    def recheck_interval(self) -> timedelta | None:
        """Interval at which the key of an open stream is verified again."""
        return self._verifier.memory

    async def authenticate(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the caller that the key belongs to.

        Raises:
            CredentialsMissing: the call has no key.
            CredentialsInvalid: the key is unknown, revoked, expired or retired.
            NotBuiltYet: the method's service is in no contract.
            ScopeMissing: the key lacks the scope, or only services may call the method.
        """
        key = await self._verifier.verify(bearer_token(metadata))
        requirement = requirement_of(method[1:])
        if requirement is None:
            raise NotBuiltYet(method[1:])
        if requirement is not Access.ANY_KEY and requirement not in key.scopes:
            raise ScopeMissing(requirement.value)
        return key.caller


class GatewayAuthenticator:
    """Accepts the deployment's internal token for methods between services, and API keys for all other methods.

    An API key never authenticates a method between services, and the internal token authenticates no other method.
    """

    def __init__(self, keys: Authenticator, services: Authenticator, *, internal_token: str, is_open: bool) -> None:
        """Combine an authenticator of API keys with one of services that hold `internal_token`.

        Args:
            is_open: whether services without credentials are trusted if `internal_token` is empty. Set this only if
                other machines cannot reach the gateway.
        """
        self._keys = keys
        self._services = services
        self._internal_token = internal_token
        self._is_open = is_open

    @property
    def recheck_interval(self) -> timedelta | None:
        return self._keys.recheck_interval

    async def authenticate(self, method: str, metadata: Mapping[str, str]) -> Caller:
        if requirement_of(method[1:]) is not Access.INTERNAL or not self._is_service(metadata):
            return await self._keys.authenticate(method, metadata)
        caller = await self._services.authenticate(method, metadata)
        return Caller(tenant_id=caller.tenant_id, is_internal=True)

    def _is_service(self, metadata: Mapping[str, str]) -> bool:
        if not self._internal_token:
            return self._is_open and 'authorization' not in metadata
        try:
            return hmac.compare_digest(bearer_token(metadata).encode(), self._internal_token.encode())
        except CredentialsMissing:
            return False
