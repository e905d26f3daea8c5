"""Fetches versions that requests need, with at most one fetch per version, shared by all requests that wait for it.

A fetch continues after its last waiter has stopped waiting, so that a retried request finds its version. Once the
weights have arrived, the fetch waits for free capacity only while a request waits for the version.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from twinkle_services.kit.telemetry import spans
from twinkle_services.sampler.domain.adapter import AdapterWeights, VersionKey
from twinkle_services.sampler.domain.errors import VersionNotReady
from twinkle_services.sampler.domain.residency import ResidentVersion

MAX_UNAWAITED = 8
"""Maximum number of fetches without a waiter, running or failed; if another is added, the oldest is cancelled."""


@dataclass(eq=False)
class _Fetch:
    """The fetch of one version."""

    waiter_count: int = 0
    task: asyncio.Task[ResidentVersion | None] = field(init=False)
    """Task that loads the version; it returns None if there was no capacity and no waiter."""

    def failure(self) -> BaseException | None:
        """Return the error of a failed fetch; None if the fetch is running, succeeded or was cancelled."""
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


class Fetches:
    """The fetches of one sampler.

    Concurrency: use it from one event loop only.
    """

    def __init__(self, try_admit: Callable[[VersionKey, AdapterWeights], Awaitable[ResidentVersion | None]]) -> None:
        """Create an empty set.

        Args:
            try_admit: Loads fetched weights into the engine; returns None if there is no capacity now.
        """
        self._try_admit = try_admit
        # Fetches are ordered by the time at which their last waiter joined.
        self._fetches: dict[VersionKey, _Fetch] = {}
        self._capacity_changed = asyncio.Event()

    async def join(self, key: VersionKey, fetch_weights: Callable[[], Awaitable[AdapterWeights]]) -> ResidentVersion:
        """Wait for a version's running fetch, or start one with `fetch_weights`, and return the loaded version.

        Raises:
            DomainError: The fetch failed, during this call or before it, or it ended because there was no capacity.
        """
        fetch = self._fetches.pop(key, None)
        if fetch is not None and (error := fetch.failure()) is not None:
            raise error
        if fetch is None or fetch.task.done():
            # The version of a successful fetch has already been evicted, so it must be fetched again.
            fetch = self._begin(key, fetch_weights)
        self._fetches[key] = fetch
        fetch.waiter_count += 1
        try:
            version = await asyncio.shield(fetch.task)
        finally:
            self._leave(key, fetch)
        if version is None:
            raise VersionNotReady(key.adapter.name, key.version)
        return version

    def notify_capacity(self) -> None:
        """Let fetches that wait for capacity try again."""
        self._capacity_changed.set()
        self._capacity_changed = asyncio.Event()

    async def close(self) -> None:
        """Cancel all fetches."""
        tasks = [fetch.task for fetch in self._fetches.values()]
        self._fetches.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _begin(self, key: VersionKey, fetch_weights: Callable[[], Awaitable[AdapterWeights]]) -> _Fetch:
        fetch = _Fetch()
        # If the task referred to the fetch, a reference cycle would keep the weights in memory after a failure.
        fetch.task = asyncio.create_task(self._run(key, fetch_weights), name=f'fetch {key}')
        fetch.task.add_done_callback(lambda _: self._on_done(key, fetch))
        return fetch

    async def _run(
        self, key: VersionKey, fetch_weights: Callable[[], Awaitable[AdapterWeights]]
    ) -> ResidentVersion | None:
        with spans.span('weight pull', adapter_id=key.adapter.name, version=key.version) as span:
            weights = await fetch_weights()
            spans.annotate(span, size_bytes=weights.size_bytes)
        while True:
            changed = self._capacity_changed
            if (version := await self._try_admit(key, weights)) is not None or not self._has_waiters(key):
                return version
            await changed.wait()

    def _has_waiters(self, key: VersionKey) -> bool:
        fetch = self._fetches.get(key)
        return fetch is not None and fetch.waiter_count > 0

    def _leave(self, key: VersionKey, fetch: _Fetch) -> None:
        fetch.waiter_count -= 1
        if fetch.waiter_count:
            return
        if fetch.task.done():
            self._remove(key, fetch)
            return
        # Wake the fetch if it waits for capacity, so that it finishes without a waiter.
        self.notify_capacity()
        unawaited = [name for name, other in self._fetches.items() if not other.waiter_count]
        for name in unawaited[:-MAX_UNAWAITED]:
            self._fetches.pop(name).task.cancel()

    def _on_done(self, key: VersionKey, fetch: _Fetch) -> None:
        """Remove a successful fetch without waiters; `failure` also marks an exception as retrieved."""
        if fetch.failure() is None and not fetch.waiter_count:
            self._remove(key, fetch)

    def _remove(self, key: VersionKey, fetch: _Fetch) -> None:
        if self._fetches.get(key) is fetch:
            del self._fetches[key]
