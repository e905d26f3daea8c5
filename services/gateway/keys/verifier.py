"""Finds the API key of a secret. This runs on every call, so results are cached for a short time."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta

from services.gateway.keys.pepper import PepperedHasher
from services.gateway.keys.ports import KeyStore
from services.gateway.keys.rules import ApiKey
from services.kit.clock import Clock
from services.kit.errors import CredentialsInvalid

MAX_CACHED = 4096
"""Capacity of each cache; valid and unknown keys have separate ones, so that guesses evict no valid key."""
MAX_LOOKUPS = 64
"""Largest number of concurrent store lookups; further ones wait, so that guesses cannot overload the store."""


@dataclass(frozen=True)
class _CachedKey:
    key: ApiKey | None
    stale_at: float
    """Time on the clock's monotonic scale."""


class KeyVerifier:
    """Verifies secrets. Unknown, revoked and expired secrets raise the same error.

    Results are cached by digest for `memory`, so that a key that another gateway revoked stays valid here for up to
    that time.
    """

    def __init__(self, keys: KeyStore, *, hasher: PepperedHasher, clock: Clock, memory: timedelta) -> None:
        self._keys = keys
        self._hasher = hasher
        self._clock = clock
        self._memory_seconds = memory.total_seconds()
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

    def forget(self) -> None:
        """Clear the caches; lookups in progress are not cached either."""
        self._epoch += 1
        self._known.clear()
        self._unknown.clear()

    async def _look_up(self, digest: bytes) -> _CachedKey:
        async with self._lookups:
            epoch = self._epoch
            key = await self._keys.find(digest)
        found = _CachedKey(key, self._clock.monotonic() + self._memory_seconds)
        if epoch == self._epoch:
            cache = self._unknown if key is None else self._known
            self._unknown.pop(digest, None)
            cache[digest] = found
            cache.move_to_end(digest)
            if len(cache) > MAX_CACHED:
                cache.popitem(last=False)
        return found
