"""Follows the versions of adapters with a limited number of streams. A stream that is idle for too long is closed."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import structlog

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.telemetry import measures, spans
from twinkle_services.sampler.domain.adapter import AdapterKey, AdapterWeights
from twinkle_services.sampler.domain.errors import VersionNotReady

_log = structlog.get_logger('versions')


class Follower:
    """The stream of an adapter's versions, for the requests that wait for a version."""

    def __init__(self) -> None:
        self.newest = 0
        """Newest announced version; 0 before the first one."""
        self.is_synced = False
        """Whether the source has reported that no newer version exists for now."""
        self.user_count = 0
        """Number of requests and relays that currently wait for versions."""
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()

    def announce(self, version: int, *, is_synced: bool = False) -> None:
        """Record a version that the stream has received, and wake all waiters."""
        self.newest = max(self.newest, version)
        self.is_synced = is_synced
        self.notify()

    def measure_publication(self, weights: AdapterWeights) -> None:
        """Record the time since the publication of a version that can be used now.

        The first version of a stream may be old and is not measured.
        """
        if self.is_synced and weights.publish_time is not None:
            # The clocks of two hosts may differ.
            measures.publish_to_live.record(max(0.0, (datetime.now(UTC) - weights.publish_time).total_seconds()))

    def notify(self) -> None:
        """Wake all waiters."""
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self, error: BaseException | None) -> None:
        """Record that the stream is closed, and wake all waiters.

        Args:
            error: Failure of the stream, or None.
        """
        if error is None:
            self._end.set_result(None)
        else:
            # The frames of the traceback would keep the stream's weights in memory until the garbage collector runs.
            self._end.set_exception(error.with_traceback(None))
            self._end.exception()
        self.notify()

    async def wait_for_change(self) -> None:
        """Wait for the next announcement, or until the stream is closed.

        Raises:
            DomainError: The stream failed with this error.
        """
        if not self._end.done():
            await self._changed.wait()
        if self._end.done():
            self._end.result()

    async def wait_for_end(self) -> BaseException | None:
        """Wait until the stream is closed, and return its error; None if it closed without an error."""
        await asyncio.wait([self._end])
        return self._end.exception()


class Followers:
    """The streams of one sampler.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self,
        run: Callable[[Caller, AdapterKey, Follower], Coroutine[Any, Any, None]],
        *,
        max_followers: int,
        idle: timedelta,
    ) -> None:
        """Create an empty set of streams.

        Args:
            run: Reads one adapter's stream and announces its versions to the follower.
            max_followers: Maximum number of open streams.
            idle: Time without use after which a stream is closed.
        """
        self._run = run
        self._max_followers = max_followers
        self._idle_seconds = idle.total_seconds()
        # Ordered by last use, least recent first.
        self._followers: dict[AdapterKey, Follower] = {}
        self._tasks: dict[Follower, asyncio.Task[None]] = {}
        self._idle_timers: dict[AdapterKey, asyncio.TimerHandle] = {}

    def __contains__(self, adapter: AdapterKey) -> bool:
        return adapter in self._followers

    @contextmanager
    def following(self, caller: Caller, adapter: AdapterKey) -> Iterator[Follower]:
        """Follow an adapter; the stream stays open at least within this block.

        Raises:
            VersionNotReady: The maximum number of streams is in use for other adapters.
        """
        follower = self._followers.pop(adapter, None) or self._begin(caller, adapter)
        self._followers[adapter] = follower
        follower.user_count += 1
        try:
            yield follower
        finally:
            follower.user_count -= 1
            self.touch(adapter)

    def touch(self, adapter: AdapterKey) -> None:
        """Restart the idle timer of an adapter's stream; do nothing if the adapter is not followed."""
        if timer := self._idle_timers.pop(adapter, None):
            timer.cancel()
        if adapter in self._followers:
            self._followers[adapter] = self._followers.pop(adapter)
            loop = asyncio.get_running_loop()
            self._idle_timers[adapter] = loop.call_later(self._idle_seconds, self._stop_if_idle, adapter)

    def stop_idle(self, adapter: AdapterKey) -> None:
        """Stop following an adapter, unless a request or relay is waiting for its versions."""
        follower = self._followers.get(adapter)
        if follower is not None and not follower.user_count:
            self._drop(adapter)

    async def stop(self, adapter: AdapterKey) -> None:
        """Stop following an adapter; requests that are still waiting open a new stream."""
        follower = self._drop(adapter)
        if follower is not None:
            await follower.wait_for_end()

    async def close(self) -> None:
        """Stop following all adapters."""
        for adapter in list(self._followers):
            await self.stop(adapter)

    def _begin(self, caller: Caller, adapter: AdapterKey) -> Follower:
        if len(self._followers) >= self._max_followers:
            unused = next((key for key, other in self._followers.items() if not other.user_count), None)
            if unused is None:
                raise VersionNotReady(adapter.name, 0)
            self._drop(unused)
        follower = Follower()
        following = self._follow(caller, adapter, follower)
        # The stream stays open after the call that begins it.
        task = asyncio.create_task(following, name=f'follow {adapter}', context=spans.separate_trace())
        # If the follower referred to its task, the frames of the ended task would keep the weights in memory.
        self._tasks[follower] = task
        task.add_done_callback(partial(self._on_done, follower))
        return follower

    async def _follow(self, caller: Caller, adapter: AdapterKey, follower: Follower) -> None:
        try:
            await self._run(caller, adapter, follower)
        finally:
            if self._followers.get(adapter) is follower:
                self._drop(adapter)

    def _on_done(self, follower: Follower, task: asyncio.Task[None]) -> None:
        del self._tasks[follower]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, DomainError):
            _log.info('version stream ended', task=task.get_name(), error=str(error))
        elif error is not None:
            _log.error('version stream failed', task=task.get_name(), exc_info=error)
        follower.end(error)

    def _stop_if_idle(self, adapter: AdapterKey) -> None:
        self._idle_timers.pop(adapter, None)
        self.stop_idle(adapter)

    def _drop(self, adapter: AdapterKey) -> Follower | None:
        if timer := self._idle_timers.pop(adapter, None):
            timer.cancel()
        follower = self._followers.pop(adapter, None)
        task = self._tasks.get(follower) if follower is not None else None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        return follower
