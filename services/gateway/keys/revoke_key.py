"""The verb that makes an API key worthless."""

from services.gateway.errors import KeyNotFound
from services.gateway.keys.api_key import ApiKey
from services.gateway.keys.ports import KeyStore
from services.gateway.keys.verify_key import VerifyKey
from services.kit.clock import Clock


class RevokeKey:
    """Revokes a key; revoking again changes nothing."""

    def __init__(self, keys: KeyStore, *, verify: VerifyKey, clock: Clock) -> None:
        """Revoke in `keys`, and have `verify` forget at once what it remembers."""
        self._keys = keys
        self._verify = verify
        self._clock = clock

    async def __call__(self, key_id: str) -> ApiKey:
        """Return the key, revoked.

        Raises:
            KeyNotFound: there is no such key.
        """
        key = await self._keys.revoke(key_id, moment=self._clock.now())
        self._verify.forget()
        if key is None:
            raise KeyNotFound(key_id)
        return key
