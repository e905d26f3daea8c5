"""The verb by which a client says that it is there."""

from services.gateway.errors import SessionNotFound
from services.gateway.sessions.ports import SessionStore
from services.gateway.sessions.session import Session
from services.kit.caller import Caller
from services.kit.clock import Clock


class Heartbeat:
    """Keeps a session alive; brings an expired one back."""

    def __init__(self, sessions: SessionStore, *, clock: Clock) -> None:
        """Keep sessions in `sessions`."""
        self._sessions = sessions
        self._clock = clock

    async def __call__(self, caller: Caller, session_id: str) -> Session:
        """Return the session, active.

        Raises:
            SessionNotFound: the caller has no such session.
            SessionFinished: its client said that it was done.
        """
        now = self._clock.now()
        session = await self._sessions.change(caller.tenant_id, session_id, lambda found: found.heard(now))
        if session is None:
            raise SessionNotFound(session_id)
        return session
