"""Exponential backoff for calls that fail while the server is unavailable."""

import asyncio

from twinkle_client.errors import Error, RetryableError

_FIRST_DELAY = 0.2
_LAST_DELAY = 5.0
_WORK_SECONDS = 10.0
"""Shortest attempt that proves the server was working: grpc itself retries some calls for several seconds."""


class Backoff:
    """Growing pauses between attempts until an outage has lasted too long.

    Args:
        seconds: Longest outage that is tolerated, counted from its first failure.

    Concurrency: to be used by coroutines of one event loop.
    """

    def __init__(self, seconds: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        """Start a new outage at the next failure; call this after progress."""
        self._end: float | None = None
        self._resumed = self._clock()

    async def wait_or_raise(self, error: Error, *, may_retry: bool = False) -> None:
        """Pause before the next attempt, at least for the retry delay that the server requested.

        Args:
            error: Failure of the last attempt.
            may_retry: Retry even if `error` is not a `RetryableError`.

        Raises:
            Error: `error` itself, if it is not retryable or the outage has lasted too long.
        """
        now = self._clock()
        # The server worked on a long attempt, so its failure begins a new outage.
        if self._end is None or now - self._resumed > max(self._seconds / 2, _WORK_SECONDS):
            self._end, self._delay = now + self._seconds, _FIRST_DELAY
        if not (may_retry or isinstance(error, RetryableError)) or now >= self._end:
            # The cause would be grpc's error, which repeats the message and contains addresses.
            raise error from None
        delay, self._delay = self._delay, min(2 * self._delay, _LAST_DELAY)
        await asyncio.sleep(max(delay, error.retry_after.total_seconds() if error.retry_after else 0.0))
        self._resumed = self._clock()
