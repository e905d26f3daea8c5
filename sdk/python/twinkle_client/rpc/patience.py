"""How long something is tried again while the server cannot serve it."""

import asyncio

from twinkle_client.errors import Error, RetryableError

_FIRST_DELAY = 0.2
_LAST_DELAY = 5.0
_WORK_SECONDS = 10.0
"""A shorter attempt may have been no work: grpc itself tries some calls again for several seconds."""


class Patience:
    """Growing pauses until an outage has lasted too long; for coroutines of one loop."""

    def __init__(self, seconds: float) -> None:
        """Bear outages of `seconds`, counted from an outage's first failure."""
        self._clock = asyncio.get_running_loop().time
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Count from the next failure, after something went well."""
        self._end: float | None = None
        self._resumed = self._clock()

    async def wait_or_raise(self, error: Error, *, may_retry: bool = False) -> None:
        """Pause before the next attempt, for as long as the server asked at least.

        Args:
            error: why the last one failed.
            may_retry: whatever kind of error it is.

        Raises:
            Error: `error`, where there should be no other attempt.
        """
        now = self._clock()
        # An attempt that lasted was worked on: it failed by another outage than the one before.
        if self._end is None or now - self._resumed > max(self._seconds / 2, _WORK_SECONDS):
            self._end, self._delay = now + self._seconds, _FIRST_DELAY
        if not (may_retry or isinstance(error, RetryableError)) or now >= self._end:
            # grpc's own error says the same in worse words, with addresses in it.
            raise error from None
        delay, self._delay = self._delay, min(2 * self._delay, _LAST_DELAY)
        await asyncio.sleep(max(delay, error.retry_after.total_seconds() if error.retry_after else 0.0))
        self._resumed = self._clock()
