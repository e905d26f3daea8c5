"""The verb that tells who holds an API key. It runs on every call, so it remembers a little."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta

from services.gateway.keys.api_key import ApiKey
from services.gateway.keys.ports import KeyStore, SecretHasher
from services.kit.clock import Clock
from services.kit.errors import CredentialsInvalid

MAX_REMEMBERED = 4096
"""Most keys remembered; good and unknown ones are counted apart, so that guessing evicts no good one."""
LOOKUPS_AT_ONCE = 64
"""Most questions to the store at one time; strangers' guesses wait, they do not pile up in the store."""


@dataclass(frozen=True)
class _Memory:
    key: ApiKey | None
    stale_at: float
    """On the clock's monotonic scale."""


class VerifyKey:
    """Tells which key a secret belongs to.

    Unknown, revoked and expired secrets are refused alike. What was looked up is remembered by
    digest, never by secret, for `memory`: a key revoked by another gateway works for that much longer.
    """

    def __init__(self, keys: KeyStore, *, hasher: SecretHasher, clock: Clock, memory: timedelta) -> None:
        """Look keys up in `keys`."""
        self._keys = keys
        self._hasher = hasher
        self._clock = clock
        self._memory_seconds = memory.total_seconds()
        self._known: OrderedDict[bytes, _Memory] = OrderedDict()
        self._unknown: OrderedDict[bytes, _Memory] = OrderedDict()
        self._lookups = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._epoch = 0

    async def __call__(self, secret: str) -> ApiKey:
        """Return the key.

        Raises:
            CredentialsInvalid: there is no good key with this secret.
        """
        digest = self._hasher.digest(secret)
        remembered = self._known.get(digest) or self._unknown.get(digest)
        if remembered is None or remembered.stale_at <= self._clock.monotonic():
            remembered = await self._look_up(digest)
        if remembered.key is None or not remembered.key.is_valid_at(self._clock.now()):
            raise CredentialsInvalid()
        return remembered.key

    def forget(self) -> None:
        """Drop all that is remembered, what is being looked up included."""
        self._epoch += 1
        self._known.clear()
        self._unknown.clear()

    async def _look_up(self, digest: bytes) -> _Memory:
        async with self._lookups:
            epoch = self._epoch
            key = await self._keys.find(digest)
        memory = _Memory(key, self._clock.monotonic() + self._memory_seconds)
        if epoch == self._epoch:
            shelf = self._unknown if key is None else self._known
            self._unknown.pop(digest, None)
            shelf[digest] = memory
            shelf.move_to_end(digest)
            if len(shelf) > MAX_REMEMBERED:
                shelf.popitem(last=False)
        return memory
