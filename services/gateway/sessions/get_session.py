"""The verb that shows a session."""

from datetime import timedelta

from services.gateway.errors import SessionNotFound
from services.gateway.sessions.ports import SessionStore
from services.gateway.sessions.session import Session
from services.kit.caller import Caller
from services.kit.clock import Clock


class GetSession:
    """Shows a session as it stands now."""

    def __init__(self, sessions: SessionStore, *, lifetime: timedelta, clock: Clock) -> None:
        """Show what `sessions` keeps; a silence of `lifetime` ends a session."""
        self._sessions = sessions
        self._lifetime = lifetime
        self._clock = clock

    async def __call__(self, caller: Caller, session_id: str) -> Session:
        """Return the session.

        Raises:
            SessionNotFound: the caller has no such session.
        """
        session = await self._sessions.get(caller.tenant_id, session_id)
        if session is None:
            raise SessionNotFound(session_id)
        return session.as_of(self._clock.now(), lifetime=self._lifetime)
