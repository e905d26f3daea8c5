"""Versions that are brought here because a request wants them: each once, whoever asks, also after it has gone.

A request that waits only a moment, or not at all, finds its version on a later try: what was begun for it goes on
while there is room for the version. Nothing waits for room on behalf of nobody.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.sampler.domain.adapter import AdapterWeights, VersionKey
from services.sampler.domain.errors import VersionNotReady
from services.sampler.domain.residency import ResidentVersion

MAX_UNAWAITED = 8
"""Versions on their way, and failures to be told, that nobody waits for now; the oldest is given up for another."""


@dataclass(eq=False)
class _Fetch:
    """A version on its way."""

    waiter_count: int = 0
    task: asyncio.Task[ResidentVersion | None] = field(init=False)
    """Brings None where there was no room and nobody who waited for it."""

    def failure(self) -> BaseException | None:
        """Return what it ended with instead of a version."""
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


class Fetches:
    """The versions on their way to one sampler.

    Concurrency: for one event loop.
    """

    def __init__(self, try_admit: Callable[[VersionKey, AdapterWeights], Awaitable[ResidentVersion | None]]) -> None:
        """Have `try_admit` load what has come; it returns None where there is no room now."""
        self._try_admit = try_admit
        # Those that nobody waits for longest first.
        self._fetches: dict[VersionKey, _Fetch] = {}
        self._changed = asyncio.Event()

    async def join(self, key: VersionKey, bring: Callable[[], Awaitable[AdapterWeights]]) -> ResidentVersion:
        """Return a version once it is loaded, on its way already or brought by `bring` from now on.

        Raises:
            DomainError: what it failed with, also where nobody was left then to be told.
        """
        fetch = self._fetches.pop(key, None)
        if fetch is not None and (error := fetch.failure()) is not None:
            raise error
        if fetch is None or fetch.task.done():
            # One that is done has nothing new for who comes back: its version has left again already.
            fetch = self._begin(key, bring)
        self._fetches[key] = fetch
        fetch.waiter_count += 1
        try:
            version = await asyncio.shield(fetch.task)
        finally:
            self._leave(key, fetch)
        if version is None:
            raise VersionNotReady(key.adapter.name, key.version)
        return version

    def note_room(self) -> None:
        """Take it that there may be room for what waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Bring nothing more."""
        tasks = [fetch.task for fetch in self._fetches.values()]
        self._fetches.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _begin(self, key: VersionKey, bring: Callable[[], Awaitable[AdapterWeights]]) -> _Fetch:
        fetch = _Fetch()
        fetch.task = asyncio.create_task(self._run(key, fetch, bring), name=f'fetch {key}')
        fetch.task.add_done_callback(lambda _: self._note_end(key, fetch))
        return fetch

    async def _run(
        self, key: VersionKey, fetch: _Fetch, bring: Callable[[], Awaitable[AdapterWeights]]
    ) -> ResidentVersion | None:
        weights = await bring()
        while True:
            changed = self._changed
            if (version := await self._try_admit(key, weights)) is not None or not fetch.waiter_count:
                return version
            await changed.wait()

    def _leave(self, key: VersionKey, fetch: _Fetch) -> None:
        fetch.waiter_count -= 1
        if fetch.waiter_count:
            return
        if fetch.task.done():
            self._forget(key, fetch)
            return
        # What waits for room looks whether anybody waits for it.
        self.note_room()
        unawaited = [name for name, other in self._fetches.items() if not other.waiter_count]
        for name in unawaited[:-MAX_UNAWAITED]:
            self._fetches.pop(name).task.cancel()

    def _note_end(self, key: VersionKey, fetch: _Fetch) -> None:
        """Forget what nobody has to be told; looking at a failure has it count as seen."""
        if fetch.failure() is None and not fetch.waiter_count:
            self._forget(key, fetch)

    def _forget(self, key: VersionKey, fetch: _Fetch) -> None:
        if self._fetches.get(key) is fetch:
            del self._fetches[key]
