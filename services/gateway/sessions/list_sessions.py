"""The verb that lists sessions."""

from datetime import timedelta

from services.gateway.paging import Cursor, Listing, Page, list_page
from services.gateway.sessions.ports import SessionStore
from services.gateway.sessions.session import Session
from services.kit.caller import Caller
from services.kit.clock import Clock


class ListSessions:
    """Lists the caller's sessions as they stand now, newest first."""

    def __init__(self, sessions: SessionStore, *, lifetime: timedelta, clock: Clock) -> None:
        """List what `sessions` keeps; a silence of `lifetime` ends a session."""
        self._sessions = sessions
        self._lifetime = lifetime
        self._clock = clock

    async def __call__(self, caller: Caller, page: Page) -> Listing[Session]:
        """Return one page."""
        now = self._clock.now()
        found = await self._sessions.list_newest(caller.tenant_id, page)
        current = [session.as_of(now, lifetime=self._lifetime) for session in found]
        return list_page(current, page, cursor_of=lambda session: Cursor(session.create_time, session.session_id))
