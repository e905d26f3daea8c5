"""Counts attempts at work that may crash the process, by a fault in native code or by exhausting the memory.

Without the counts, a client that repeats a crashing request could end the process again and again, for all tenants.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.failpoints import reach
from twinkle_services.model.ports import Journal

MAX_ATTEMPTS = 3
"""Number of attempts that may end the process. The next one is refused, so that the work cannot prevent the service
from serving other tenants."""
_CAREFUL_SECONDS = 600.0
"""Seconds after the restart that follows a crash. In this time, only one counted attempt runs at a time, because a
client may repeat the request that caused the crash."""


class Attempts:
    """Counts the attempts of one service. Concurrency: use it from one event loop only."""

    def __init__(self, journal: Journal, *, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._careful_until = clock.monotonic() + _CAREFUL_SECONDS if journal.was_killed else 0.0
        self._alone = asyncio.Lock()

    @property
    def is_careful(self) -> bool:
        """Whether the service has crashed recently, so that operations must be on record before they run."""
        return self._clock.monotonic() < self._careful_until

    @asynccontextmanager
    async def counted(self, work: str, *, refusal: DomainError) -> AsyncIterator[None]:
        """Count an attempt durably before the block runs. The count is reset unless the process ends in the block.

        For some time after a crash, these blocks run one at a time, so that only the cause of a crash is counted. In
        this time, refused work stays refused. Later, a refusal resets the count.

        Args:
            work: Name of the work in the journal.
            refusal: Error to raise if the process ended during each of the last `MAX_ATTEMPTS` attempts.

        Raises:
            JournalUnavailable: The attempt could not be counted.
            DomainError: The error `refusal`; the block did not run.
        """
        async with self._alone if self.is_careful else nullcontext():
            count = await self._journal.count_attempt(work)
            if count > MAX_ATTEMPTS:
                # The count is kept at first, because a client that repeats the request could crash the service again.
                if not self.is_careful:
                    self._journal.reset_attempts(work)
                raise refusal
            try:
                reach('attempt.counted')
                yield
            finally:
                self._journal.reset_attempts(work)
