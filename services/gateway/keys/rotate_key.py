"""The verb that replaces an API key."""

from dataclasses import dataclass
from datetime import timedelta

from services.gateway.errors import KeyNotFound
from services.gateway.keys.api_key import ApiKey, new_secret
from services.gateway.keys.create_key import NewKey
from services.gateway.keys.ports import KeyStore, SecretHasher
from services.gateway.keys.verify_key import VerifyKey
from services.kit.clock import Clock
from services.kit.ids import new_id

DEFAULT_OVERLAP = timedelta(days=1)
"""How long a replaced key still works where nothing else is asked for."""


@dataclass(frozen=True, kw_only=True)
class RotatedKey:
    """The new key with its secret, and the old one with its end."""

    new: NewKey
    old: ApiKey


class RotateKey:
    """Makes another secret for the rights of a key, which still works for a while so that all its users can change."""

    def __init__(self, keys: KeyStore, *, hasher: SecretHasher, verify: VerifyKey, clock: Clock) -> None:
        """Replace in `keys`, and have `verify` forget at once what it remembers."""
        self._keys = keys
        self._hasher = hasher
        self._verify = verify
        self._clock = clock

    async def __call__(self, key_id: str, *, overlap: timedelta) -> RotatedKey:
        """Return both keys.

        Raises:
            KeyNotFound: there is no such key.
            KeyEnded: it is worthless already.
        """
        now = self._clock.now()
        heir_id = new_id('key')
        secret = new_secret(heir_id)
        succession = await self._keys.replace(
            key_id,
            lambda key: key.replaced_by(heir_id, moment=now, overlap=overlap),
            digest=self._hasher.digest(secret),
        )
        self._verify.forget()
        if succession is None:
            raise KeyNotFound(key_id)
        return RotatedKey(new=NewKey(key=succession.heir, secret=secret), old=succession.retired)
