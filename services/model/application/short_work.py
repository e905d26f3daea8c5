"""Short work on the engine, such as creating or parking an adapter, which consists of several calls of the engine.

No pass starts between these calls, so short work waits only for the pass that is running when it begins.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

_LIMIT_SECONDS = 0.5
"""Maximum time by which short work delays a pass, for example if a disk is slow."""


class ShortWork:
    """Tracks the short work in progress. Concurrency: use it from one event loop only."""

    def __init__(self) -> None:
        self._in_progress: set[asyncio.Future[None]] = set()

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Hold back the next pass until the block ends."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_progress.add(done)
        try:
            yield
        finally:
            self._in_progress.discard(done)
            done.set_result(None)

    async def wait(self) -> None:
        """Wait for the short work that is in progress now, within the limit. The same work delays only one pass."""
        waiting, self._in_progress = self._in_progress, set()
        if waiting:
            await asyncio.wait(waiting, timeout=_LIMIT_SECONDS)
