"""SQLite connection whose statements finish even when the caller is cancelled.

The SQLite driver runs statements in a thread. If a caller were cancelled in the middle of a statement, the connection
could stay open with its transaction begun, and would block all writers until it is garbage-collected.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

Result = TypeVar('Result')


class ShieldedConnection(AsyncConnection):
    """Delays a cancellation until the current step, at most one statement, has finished."""

    async def start(self, is_ctxmanager: bool = False) -> 'ShieldedConnection':  # noqa: FBT001, FBT002 (overrides)
        try:
            await finish(super().start(is_ctxmanager))
        except asyncio.CancelledError:
            # The cancelled caller never receives the connection, so nothing else would close it.
            if self.sync_connection is not None:
                await self.close()
            raise
        return self

    async def execute(self, *arguments: Any, **options: Any) -> Any:
        return await finish(super().execute(*arguments, **options))

    async def run_sync(self, work: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        return await finish(super().run_sync(work, *arguments, **options))

    async def commit(self) -> None:
        await finish(super().commit())

    async def close(self) -> None:
        await finish(super().close())


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end and return its result; a cancellation is raised only after that."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            # Marks the exception as retrieved: a cancelled caller cannot receive it.
            task.exception()
        raise
