"""Cancels running calls whose credentials become invalid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import structlog

from twinkle_services.kit.errors import Code, DomainError

_SHORTEST_SECONDS = 0.1
"""Shortest interval between two checks."""
_REFUSALS = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)

_log = structlog.get_logger('rpc')


@asynccontextmanager
async def rechecked(check: Callable[[], Awaitable[object]], *, interval: timedelta | None) -> AsyncIterator[None]:
    """Authenticate the caller again at each interval, and cancel the block once the caller is refused.

    Args:
        check: Authenticates the caller. A failure other than a refusal is logged, and the next check follows as usual.
        interval: Time between two checks; None for no checks.

    Raises:
        DomainError: The refusal of `check`; the block was cancelled.
    """
    if interval is None:
        yield
        return
    scope = asyncio.timeout(None)
    timer = _Timer(check, scope, max(interval.total_seconds(), _SHORTEST_SECONDS))
    try:
        async with scope:
            timer.start()
            try:
                yield
            finally:
                timer.stop()
    except TimeoutError as error:
        if timer.refusal is None or not scope.expired():
            raise
        raise timer.refusal from error


class _Timer:
    """Runs a check at each interval. A task exists only during a check: most calls finish before the first interval."""

    def __init__(self, check: Callable[[], Awaitable[object]], scope: asyncio.Timeout, seconds: float) -> None:
        self._check = check
        self._scope = scope
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.refusal: DomainError | None = None

    def start(self) -> None:
        self._handle = self._loop.call_later(self._seconds, self._begin)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._check()
        except DomainError as error:
            if error.code in _REFUSALS:
                self.refusal = error
                self._scope.reschedule(self._loop.time())
                return
            _log.warning('recheck of credentials failed; retrying', reason=error.reason)
        except Exception as error:
            _log.error('recheck of credentials failed; retrying', exc_info=error)
        self.start()
