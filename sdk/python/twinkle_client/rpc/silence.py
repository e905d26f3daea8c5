"""Reports that a running response waits for an unavailable service.

The gateway continues such a response once the service is back. Until then the stream is silent, as it also is while a
slow model computes. The client therefore asks the gateway which services respond.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from twinkle_client.rpc.outages import Outages

_SILENT_SECONDS = 1.0
"""Time without a message after which the gateway is asked, and the minimum time between two questions."""


class Silence:
    """Watches the streams of a connection.

    Args:
        ask: Returns the names of the services that do not respond.
        outages: Receives the outages.

    Concurrency: to be used by coroutines of one event loop.
    """

    def __init__(self, ask: Callable[[], Awaitable[frozenset[str]]], outages: Outages) -> None:
        self._ask = ask
        self._outages = outages
        self._lock = asyncio.Lock()
        self._answer: tuple[float, frozenset[str]] = (float('-inf'), frozenset())
        """Time of the last question, and its answer, which all silent streams share."""

    @contextmanager
    def watched(self, service: str) -> Iterator[Callable[[], None]]:
        """Watch a stream of `service` for the duration of the block. Call the returned function for each message.

        A stream without a service is not watched.
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
        """Return whether no message arrived for a while."""
        return self._clock() - self._last >= _SILENT_SECONDS
