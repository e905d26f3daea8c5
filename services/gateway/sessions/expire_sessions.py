"""The verb that writes down which sessions have expired."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Never

import structlog

from services.gateway.sessions.ports import SessionStore
from services.kit.clock import Clock
from services.kit.errors import DomainError
from services.kit.failpoints import reach

_log = structlog.get_logger('sessions')


class ExpireSessions:
    """Marks sessions expired whose clients are silent; a heartbeat brings each back."""

    def __init__(
        self,
        sessions: SessionStore,
        *,
        lifetime: timedelta,
        clock: Clock,
        settle: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """Sweep `sessions`; a silence of `lifetime` ends a session, and `settle` looks after what it leaves behind."""
        self._settle = settle
        self._sessions = sessions
        self._lifetime = lifetime
        self._clock = clock

    async def __call__(self) -> int:
        """Return how many were marked."""
        return await self._sessions.expire(silent_since=self._clock.now() - self._lifetime)

    async def keep_on(self, *, interval: timedelta, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Never:
        """Sweep every `interval` until cancelled; a sweep that fails is made up for by the next.

        No session expires in the first lifetime: nobody could be heard while no gateway was there.
        """
        begin = self._clock.now()
        while True:
            await pause(interval.total_seconds())
            try:
                if self._clock.now() - begin >= self._lifetime and (count := await self()):
                    _log.info('sessions expired', count=count)
                    reach('session.expired')
                if self._settle is not None:
                    await self._settle()
            except DomainError as error:
                _log.warning('sweep failed', reason=error.reason)
