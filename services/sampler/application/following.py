"""Adapters whose versions are followed: a bounded number of streams, those not used for a while ended."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import structlog

from services.kit.caller import Caller
from services.sampler.domain.adapter import AdapterKey
from services.sampler.domain.errors import VersionNotReady

_log = structlog.get_logger('versions')


class Follower:
    """One adapter's stream of versions, as those see it who wait for one."""

    def __init__(self) -> None:
        """Begin knowing nothing."""
        self.newest = 0
        """The newest version that was announced; 0 while that is not known."""
        self.is_synced = False
        """Whether the source has said that there is no newer one for now."""
        self.user_count = 0
        """Requests and relays that wait for its versions now."""
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def announce(self, version: int, *, is_synced: bool = False) -> None:
        """Take note of what the stream brought and wake whoever waits for it."""
        self.newest = max(self.newest, version)
        self.is_synced = is_synced
        self.notify()

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self) -> None:
        """Wait for news or the end of the stream.

        Raises:
            DomainError: what the stream ended with.
        """
        if not self._is_done():
            await self._changed.wait()
        if self.task is not None and self._is_done() and not self.task.cancelled():
            self.task.result()

    def _is_done(self) -> bool:
        return self.task is not None and self.task.done()


class Followers:
    """The streams of one sampler.

    Concurrency: for one event loop.
    """

    def __init__(
        self,
        run: Callable[[Caller, AdapterKey, Follower], Coroutine[Any, Any, None]],
        *,
        max_followers: int,
        idle: timedelta,
    ) -> None:
        """Have `run` feed each follower, at most `max_followers` at once, until unused for `idle`."""
        self._run = run
        self._max_followers = max_followers
        self._idle_seconds = idle.total_seconds()
        # Least recently used first.
        self._followers: dict[AdapterKey, Follower] = {}
        self._endings: dict[AdapterKey, asyncio.TimerHandle] = {}

    def __contains__(self, adapter: AdapterKey) -> bool:
        return adapter in self._followers

    @contextmanager
    def following(self, caller: Caller, adapter: AdapterKey) -> Iterator[Follower]:
        """Follow an adapter at least within this block.

        Raises:
            VersionNotReady: too many adapters are waited for.
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
        """Note that an adapter is used; it is followed for some more time if it is followed at all."""
        if ending := self._endings.pop(adapter, None):
            ending.cancel()
        if adapter in self._followers:
            self._followers[adapter] = self._followers.pop(adapter)
            loop = asyncio.get_running_loop()
            self._endings[adapter] = loop.call_later(self._idle_seconds, self._end_idle, adapter)

    def stop_idle(self, adapter: AdapterKey) -> None:
        """Follow an adapter no more if nobody waits for its versions."""
        follower = self._followers.get(adapter)
        if follower is not None and not follower.user_count:
            self._drop(adapter)

    async def stop(self, adapter: AdapterKey) -> None:
        """Follow an adapter no more; who waits for it begins again."""
        follower = self._drop(adapter)
        if follower is not None and follower.task is not None:
            await asyncio.wait([follower.task])

    async def close(self) -> None:
        """Stop following everything."""
        for adapter in list(self._followers):
            await self.stop(adapter)

    def _begin(self, caller: Caller, adapter: AdapterKey) -> Follower:
        if len(self._followers) >= self._max_followers:
            unused = next((key for key, other in self._followers.items() if not other.user_count), None)
            if unused is None:
                raise VersionNotReady(adapter.name, 0)
            self._drop(unused)
        follower = Follower()
        task = asyncio.create_task(self._follow(caller, adapter, follower), name=f'follow {adapter}')
        task.add_done_callback(_log_end)
        follower.task = task
        return follower

    async def _follow(self, caller: Caller, adapter: AdapterKey, follower: Follower) -> None:
        try:
            await self._run(caller, adapter, follower)
        finally:
            if self._followers.get(adapter) is follower:
                self._drop(adapter)
            # The task is done only after this callback; waiters look at it when they wake up.
            asyncio.get_running_loop().call_soon(follower.notify)

    def _end_idle(self, adapter: AdapterKey) -> None:
        self._endings.pop(adapter, None)
        self.stop_idle(adapter)

    def _drop(self, adapter: AdapterKey) -> Follower | None:
        if ending := self._endings.pop(adapter, None):
            ending.cancel()
        follower = self._followers.pop(adapter, None)
        if follower is not None and follower.task is not None and follower.task is not asyncio.current_task():
            follower.task.cancel()
        return follower


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.info('no longer following', task=task.get_name(), error=str(error))
