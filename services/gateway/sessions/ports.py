"""Storage port for sessions."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from twinkle_services.gateway.paging import Cursor, Listing, Page
from twinkle_services.gateway.sessions.rules import Session


class SessionStore(Protocol):
    """Stores sessions."""

    async def add_if_absent(self, session: Session) -> Session:
        """Add the session unless the tenant has one with its request id; return the stored one."""
        ...

    async def get(self, tenant_id: str, session_id: str) -> Session | None:
        """Return the tenant's session, or None."""
        ...

    async def change(self, tenant_id: str, session_id: str, change: Callable[[Session], Session]) -> Session | None:
        """Replace the session by `change(session)` in one transaction and return it; None for an unknown session.

        Raises:
            DomainError: `change` raised the error; nothing is stored.
        """
        ...

    async def expire(self, *, silent_since: datetime) -> int:
        """Mark active sessions without a heartbeat since `silent_since` as expired; return their number."""
        ...

    async def list_unsettled(self, *, after: Cursor | None, size: int) -> Sequence[Session]:
        """Return at most `size` ended sessions of all tenants that are not settled, the oldest heartbeat first.

        `after` contains the last heartbeat and the id of the previous page's last session; None for the first page.
        """
        ...

    async def list_newest(self, tenant_id: str, page: Page) -> Listing[Session]:
        """Return a page, newest first."""
        ...
