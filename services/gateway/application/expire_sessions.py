"""The verb that writes down which sessions have expired."""

from datetime import timedelta

from services.gateway.ports import SessionStore
from services.kit.clock import Clock


class ExpireSessions:
    """Marks sessions expired whose clients are silent; a heartbeat brings each back."""

    def __init__(self, sessions: SessionStore, *, lifetime: timedelta, clock: Clock) -> None:
        """Sweep `sessions`; a silence of `lifetime` ends a session."""
        self._sessions = sessions
        self._lifetime = lifetime
        self._clock = clock

    async def __call__(self) -> int:
        """Return how many were marked."""
        return await self._sessions.expire(silent_since=self._clock.now() - self._lifetime)
