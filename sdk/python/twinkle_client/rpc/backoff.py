"""Exponential backoff for calls that fail while the server is unavailable."""

import asyncio
from types import TracebackType
from typing import Self

from twinkle_client.errors import Error, RetryableError
from twinkle_client.rpc.outages import Outages

_FIRST_DELAY = 0.2
_LAST_DELAY = 5.0
_WORK_SECONDS = 10.0
"""Shortest attempt that proves the server was working: an attempt to connect may take several seconds."""
_UNREPORTED_SECONDS = 1.0
"""Outages that end within this time are not reported."""


class Backoff:
    """Growing pauses between attempts until an outage has lasted too long.

    Use it in a `with` block around the attempts, or call `reset` after the last one, so that the outage ends.

    Args:
        seconds: Longest outage that is tolerated, counted from its first failure.
        outages: Receives the outages that last for a second.

    Concurrency: to be used by coroutines of one event loop.
    """

    def __init__(self, seconds: float, outages: Outages) -> None:
        self._clock = asyncio.get_running_loop().time
        self._seconds = seconds
        self._outages = outages
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new outage at the next failure; call this after progress."""
        self._end: float | None = None
        self._resumed = self._clock()
        self._outages.remove(self)

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
            self._begin = self._resumed
        if not (may_retry or isinstance(error, RetryableError)) or now >= self._end:
            # The cause would be grpc's error, which repeats the message and contains addresses.
            raise error from None
        delay = max(self._delay, error.retry_after.total_seconds() if error.retry_after else 0.0)
        self._delay = min(2 * self._delay, _LAST_DELAY)
        if now + delay - self._begin > _UNREPORTED_SECONDS:
            self._outages.add(self, error, seconds=self._end - now)
        await asyncio.sleep(delay)
        self._resumed = self._clock()
