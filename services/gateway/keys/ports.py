"""API keys, kept, and what their secrets are kept as."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from services.gateway.keys.api_key import ApiKey, Succession
from services.gateway.paging import Page


class KeyStore(Protocol):
    """Keeps API keys by the digest of their secrets."""

    async def add(self, key: ApiKey, *, digest: bytes) -> None:
        """Keep the key; one with that digest already stays as it is."""
        ...

    async def find(self, digest: bytes) -> ApiKey | None:
        """Return the key with this digest, good or not, or None."""
        ...

    async def replace(
        self, key_id: str, succeed: Callable[[ApiKey], Succession], *, digest: bytes
    ) -> Succession | None:
        """Keep both keys of `succeed(key)` in one transaction, the heir by `digest`; None if there is no such key.

        Raises:
            DomainError: whatever `succeed` raised; nothing is changed then.
        """
        ...

    async def revoke(self, key_id: str, *, moment: datetime) -> ApiKey | None:
        """Mark the key revoked, at `moment` unless it was before, and return it; None if there is none."""
        ...

    async def list_newest(self, tenant_id: str, page: Page) -> Sequence[ApiKey]:
        """Return one item more than the page where there are as many, newest first."""
        ...


class SecretHasher(Protocol):
    """Turns secrets into what may be stored."""

    def digest(self, secret: str) -> bytes:
        """Return 32 bytes that tell nothing of the secret to whoever lacks this server's pepper."""
        ...
