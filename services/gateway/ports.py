"""What the gateway's verbs need of the world. The stores keep everything across a kill at any moment.

Concurrency: every verb of a store is one transaction; several gateways may share a store.
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from datetime import datetime
from typing import Protocol, TypeVar

from services.gateway.domain.api_key import ApiKey
from services.gateway.domain.catalogue import CatalogueEvent, Checkpoint, Run
from services.gateway.domain.listing import Page
from services.gateway.domain.session import Session
from services.gateway.domain.tenant import Tenant

Entry = TypeVar('Entry')
Entry_contra = TypeVar('Entry_contra', contravariant=True)


class TenantStore(Protocol):
    """Keeps tenants."""

    async def add_if_absent(self, tenant: Tenant) -> Tenant:
        """Keep the tenant, or leave the one of that id as it is; return what is kept."""
        ...

    async def get(self, tenant_id: str) -> Tenant | None:
        """Return the tenant, or None."""
        ...

    async def list_newest(self, page: Page) -> Sequence[Tenant]:
        """Return one item more than the page where there are as many, newest first."""
        ...


class KeyStore(Protocol):
    """Keeps API keys by the digest of their secrets."""

    async def add(self, key: ApiKey, *, digest: bytes) -> None:
        """Keep the key; one with that digest already stays as it is."""
        ...

    async def find(self, digest: bytes) -> ApiKey | None:
        """Return the key with this digest, good or not, or None."""
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


class SessionStore(Protocol):
    """Keeps sessions."""

    async def add_if_absent(self, session: Session) -> Session:
        """Keep the session, or leave the one of that tenant and request id as it is; return what is kept."""
        ...

    async def get(self, tenant_id: str, session_id: str) -> Session | None:
        """Return the tenant's session, or None."""
        ...

    async def change(self, tenant_id: str, session_id: str, change: Callable[[Session], Session]) -> Session | None:
        """Replace the session by `change(session)` in one transaction and return it; None if there is none.

        Raises:
            DomainError: whatever `change` raised; nothing is changed then.
        """
        ...

    async def expire(self, *, silent_since: datetime) -> int:
        """Mark active sessions expired that were last heard before `silent_since`; return how many."""
        ...

    async def list_newest(self, tenant_id: str, page: Page) -> Sequence[Session]:
        """Return one item more than the page where there are as many, newest first."""
        ...


class Shelf(Protocol[Entry_contra]):
    """The catalogue's copy of entries that another service owns."""

    async def save(self, entry: Entry_contra) -> None:
        """Keep the entry as it is now; it is there, whatever was marked before."""
        ...

    async def mark_gone(self, entry_id: str, *, moment: datetime) -> None:
        """Mark one entry as gone; an unknown one is no error."""
        ...

    async def mark_absent_gone(self, present: Collection[str], *, moment: datetime) -> None:
        """Mark every entry as gone whose id is not in `present`."""
        ...


class RunStore(Shelf[Run], Protocol):
    """Keeps runs. A run that is gone stays listed, inactive."""

    async def get(self, tenant_id: str, run_id: str) -> Run | None:
        """Return the tenant's run, or None."""
        ...

    async def list_newest(self, tenant_id: str, page: Page, *, base_model: str | None) -> Sequence[Run]:
        """Return one item more than the page where there are as many, newest first."""
        ...


class CheckpointStore(Shelf[Checkpoint], Protocol):
    """Keeps checkpoints. One that is gone is listed no more; its row stays."""

    async def list_newest(self, tenant_id: str, page: Page, *, run_id: str | None) -> Sequence[Checkpoint]:
        """Return one item more than the page where there are as many, newest first."""
        ...


class Feed(Protocol[Entry]):
    """Entries of another service, as they change."""

    def follow(self, resume_token: str) -> AsyncIterator[CatalogueEvent[Entry]]:
        """Return the events after `resume_token`; empty: a whole snapshot, `Synced`, then changes.

        Raises:
            DomainError: while iterating: the service cannot be reached, or does not know the token any more.
        """
        ...
