"""Sessions, kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from services.gateway.paging import Cursor, Page
from services.gateway.sessions.session import Session


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

    async def list_unsettled(self, *, after: Cursor | None, size: int) -> Sequence[Session]:
        """Return up to `size` sessions of all tenants that have ended and are not settled, those silent longest first.

        Args:
            after: time of the last heartbeat and id of the last one that is known already; None: from the first.
            size: most to return.
        """
        ...

    async def list_newest(self, tenant_id: str, page: Page) -> Sequence[Session]:
        """Return one item more than the page where there are as many, newest first."""
        ...


@dataclass(frozen=True, kw_only=True)
class ParkedAdapter:
    """An adapter that was to leave the memory."""

    is_at_rest: bool
    """False: an operation of it runs, so that it is to be parked again later."""
    checkpoint_path: str
    """Where its weights are saved; empty: nowhere."""


class AdapterKeeper(Protocol):
    """Parks adapters on behalf of a tenant.

    Every verb raises the service's own error as a DomainError, or ServiceUnreachable.
    """

    async def of_session(self, tenant_id: str, session_id: str) -> Sequence[str]:
        """Return the adapters that were made in a session, at every model service."""
        ...

    async def park(self, tenant_id: str, adapter_id: str, *, save_prefix: str) -> ParkedAdapter | None:
        """Have an adapter parked, its unsaved steps saved first where there is a prefix for the checkpoint's name.

        Again is harmless.

        Returns:
            The adapter; None where it is not there any more.
        """
        ...
