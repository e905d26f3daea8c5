"""Retries while a service is unavailable, and one warning per outage, even if many calls wait.

The gateway continues a running response once its service is available again. Until then the stream is silent. Because
streams are also silent while a slow model computes, the client asks the gateway which services respond.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import grpc

from twinkle_client.errors import Error, RetryableError

_log = logging.getLogger('twinkle_client')

_UNREACHABLE = 'SERVICE_UNREACHABLE'
"""Reason of errors for a service that does not respond to the gateway."""
_EXPECTED = ('VERSION_NOT_READY', 'ENGINE_PAUSED')
"""Reasons of temporary refusals that are not outages."""
_PROGRESS = 'POSITION_NOT_REACHED'
"""Reason of the error for a call that waits for work in progress, which may take longer than an outage is tolerated."""
_SILENT_SECONDS = 1.0
"""Time without a message after which the gateway is queried, and the minimum time between two queries."""
_FIRST_DELAY = 0.2
_LAST_DELAY = 5.0
"""Maximum delay between attempts in seconds; `_FIRST_DELAY` is the initial delay."""
_WORK_SECONDS = 10.0
"""Failed attempts that take longer than this, and longer than half of the retry time, begin a new outage.

Shorter attempts may only have tried to connect, which can take several seconds.
"""
_UNREPORTED_SECONDS = 1.0
"""Outages that end within this time are not reported."""


class Outages:
    """Logs a warning when a service becomes unavailable.

    An outage begins with the first call that waits for the service, and ends when no call waits for it.

    Args:
        address: Address of the gateway, for messages.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._waiters: dict[str, set[object]] = {}
        """Waiting calls by description of the outage."""

    def add(self, waiter: object, error: Error, *, seconds: float) -> None:
        """Record that a call waits for a service; the first such call logs a warning.

        Args:
            waiter: Identifies the call.
            error: Failure of the last attempt. Errors that do not mean an unavailable service are ignored.
            seconds: Time for which the call is retried; calls that wait for work in progress have no limit.
        """
        if error.code is not grpc.StatusCode.UNAVAILABLE or error.reason in _EXPECTED:
            return
        reaction = 'retrying' if error.reason == _PROGRESS else f'retrying for up to {seconds:.0f} s'
        self._begin(waiter, self._problem(error), reaction)

    def add_stream(self, waiter: object, service: str) -> None:
        """Record that a running response waits for a service; the first waiter logs a warning."""
        self._begin(waiter, _unavailable(service), 'the response continues when it is back')

    def remove(self, waiter: object) -> None:
        """Record that a call no longer waits."""
        for problem, waiters in list(self._waiters.items()):
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[problem]

    def _begin(self, waiter: object, problem: str, reaction: str) -> None:
        waiters = self._waiters.setdefault(problem, set())
        if not waiters:
            _log.warning('%s; %s', problem, reaction)
        waiters.add(waiter)

    def _problem(self, error: Error) -> str:
        if not error.reason:
            return f'the gateway at {self._address} is unavailable'
        if error.reason == _UNREACHABLE:
            return _unavailable(error.metadata.get('service', 'requested'))
        return error.message.removesuffix('; retry later')


class Silence:
    """Detects streams that are silent because their service is unavailable.

    Args:
        ask: Returns the names of the services that do not respond.
        outages: Receives the outages.

    Concurrency: call the methods on one event loop.
    """

    def __init__(self, ask: Callable[[], Awaitable[frozenset[str]]], outages: Outages) -> None:
        self._ask = ask
        self._outages = outages
        self._lock = asyncio.Lock()
        self._answer: tuple[float, frozenset[str]] = (float('-inf'), frozenset())
        """Time of the last query, and its answer, which all silent streams share."""

    @contextmanager
    def watched(self, service: str) -> Iterator[Callable[[], None]]:
        """Watch a stream of `service` for the duration of the block.

        For each message, the block must call the function that it receives. A stream without a service is not watched.
        """
        stream = _Stream()
        if not service:
            yield stream.record_message
            return
        watching = asyncio.create_task(self._watch(stream, service))
        try:
            yield stream.record_message
        finally:
            watching.cancel()
            self._outages.remove(stream)

    async def _watch(self, stream: '_Stream', service: str) -> None:
        while True:
            await asyncio.sleep(_SILENT_SECONDS)
            if stream.is_silent() and service in await self._unavailable():
                self._outages.add_stream(stream, service)
            else:
                self._outages.remove(stream)

    async def _unavailable(self) -> frozenset[str]:
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._answer[0] >= _SILENT_SECONDS:
                self._answer = now, await self._ask()
            return self._answer[1]


class _Stream:
    """Time since the last message of a stream."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.record_message()

    def record_message(self) -> None:
        """Record that a message arrived."""
        self._last = self._clock()

    def is_silent(self) -> bool:
        """Return whether no message has arrived for `_SILENT_SECONDS`."""
        return self._clock() - self._last >= _SILENT_SECONDS


def _unavailable(service: str) -> str:
    return f'the {service} service is unavailable'


class Backoff:
    """Waits between attempts, longer each time, until an outage has lasted too long.

    Use the object in a `with` block around the attempts, or call `reset` after the last attempt, to end the outage.

    Args:
        seconds: Longest outage that is tolerated, counted from its first failure.
        outages: Receives the outages that last for more than a second.

    Concurrency: call the methods on one event loop.
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
        """Wait before the next attempt, at least for the retry delay that the server requested.

        Args:
            error: Failure of the last attempt.
            may_retry: Retry even if `error` is not a `RetryableError`.

        Raises:
            Error: `error` itself, if it is not retryable or the outage has lasted too long.
        """
        now = self._clock()
        # The server was available during a long attempt or works for this call, so the failure begins a new outage.
        is_working = error.reason == _PROGRESS or now - self._resumed > max(self._seconds / 2, _WORK_SECONDS)
        if self._end is None or is_working:
            self._end, self._delay = now + self._seconds, _FIRST_DELAY
            self._begin = self._resumed
        if not (may_retry or isinstance(error, RetryableError)) or now >= self._end:
            # `from None` hides grpc's error, which repeats the message and contains addresses.
            raise error from None
        delay = max(self._delay, error.retry_after.total_seconds() if error.retry_after else 0.0)
        self._delay = min(2 * self._delay, _LAST_DELAY)
        if now + delay - self._begin > _UNREPORTED_SECONDS:
            self._outages.add(self, error, seconds=self._end - now)
        await asyncio.sleep(delay)
        self._resumed = self._clock()
