"""The verb by which a client says that it is done."""

from services.gateway.errors import SessionNotFound
from services.gateway.sessions.ports import SessionStore
from services.gateway.sessions.session import FinishReason, Session
from services.kit.caller import Caller


class FinishSession:
    """Ends a session; ending again changes nothing."""

    def __init__(self, sessions: SessionStore) -> None:
        """Keep sessions in `sessions`."""
        self._sessions = sessions

    async def __call__(self, caller: Caller, session_id: str, *, reason: FinishReason) -> Session:
        """Return the session, finished.

        Raises:
            SessionNotFound: the caller has no such session.
        """
        session = await self._sessions.change(caller.tenant_id, session_id, lambda found: found.finished(reason))
        if session is None:
            raise SessionNotFound(session_id)
        return session
