"""Retries of calls that fail temporarily, for example while a service restarts."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from twinkle_services.kit.errors import DomainError

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0

Result = TypeVar('Result')

_log = structlog.get_logger('retry')


class Retry:
    """Repeats idempotent calls without a limit, with exponential back-off."""

    def __init__(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Create a policy that waits between attempts with `pause`, which receives a number of seconds."""
        self._pause = pause

    async def call(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Call `call` until it raises no transient error, and return its result.

        Raises:
            DomainError: An error that is not transient; see `Disposition.is_transient`.
        """
        failures = 0
        while True:
            try:
                return await call()
            except DomainError as error:
                if not error.disposition.is_transient:
                    raise
                # Only the first failure of each call is logged at level info.
                write = _log.debug if failures else _log.info
                write('service call failed; retrying', reason=error.reason)
            await self.back_off(failures)
            failures += 1

    async def back_off(self, failures: int) -> None:
        """Wait before the next attempt. The wait grows with the number of failures, and has jitter."""
        limit = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(failures, 10))
        await self._pause(limit * random.uniform(0.5, 1.0))
