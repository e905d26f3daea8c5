"""Trying again until what fails for now no longer does."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from services.kit.errors import DomainError

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0

Answer = TypeVar('Answer')

_log = structlog.get_logger('futures')


class Persistence:
    """Repeats calls that do no harm when repeated, for as long as it takes."""

    def __init__(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Wait between attempts with `pause`, given seconds."""
        self._pause = pause

    async def insist(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer of `call`, repeated while what it raises passes by itself.

        Raises:
            DomainError: one that does not pass.
        """
        failures = 0
        while True:
            try:
                return await call()
            except DomainError as error:
                if not error.disposition.is_transient:
                    raise
                # An outage of an hour is one line, not a thousand.
                write = _log.debug if failures else _log.info
                write('waiting for a service', reason=error.reason)
            await self.hold(failures)
            failures += 1

    async def hold(self, failures: int) -> None:
        """Wait before another attempt: the longer, the more have failed."""
        limit = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(failures, 10))
        await self._pause(limit * random.uniform(0.5, 1.0))
