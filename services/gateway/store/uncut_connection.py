"""A connection whose statements run to their end, whatever happens to whoever asked.

The driver of SQLite runs statements in a thread. Cut off in the middle of one, its connection may stay open with the
transaction begun, and nobody else writes until it is collected.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

Result = TypeVar('Result')


class UncutConnection(AsyncConnection):
    """Waits for each step's end before it lets a cancellation through; a step takes as long as a statement does."""

    async def start(self, is_ctxmanager: bool = False) -> 'UncutConnection':  # noqa: FBT001, FBT002 (the library's)
        """Connect; whoever is cut off meanwhile has no connection to give back."""
        try:
            await to_end(super().start(is_ctxmanager))
        except asyncio.CancelledError:
            if self.sync_connection is not None:
                await self.close()
            raise
        return self

    async def execute(self, *arguments: Any, **options: Any) -> Any:
        """Run a statement, and read all of its result."""
        return await to_end(super().execute(*arguments, **options))

    async def run_sync(self, work: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """Run what knows nothing of asynchronous code."""
        return await to_end(super().run_sync(work, *arguments, **options))

    async def commit(self) -> None:
        """Commit what was begun."""
        await to_end(super().commit())

    async def close(self) -> None:
        """Give the connection back; what is not committed is undone."""
        await to_end(super().close())


async def to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Return what `work` comes to; a cancellation that comes meanwhile is raised when it has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            # Whoever is cancelled does not hear of it.
            task.exception()
        raise
