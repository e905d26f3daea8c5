"""Changes to one adapter, one after the other, and each to its end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from services.checkpoint.domain import AdapterKey

_Result = TypeVar('_Result')


class Exclusive:
    """Runs changes.

    Store and catalogue are changed together or not at all, so a caller that goes away in the
    middle does not stop a change that has begun.
    """

    def __init__(self) -> None:
        """Begin with nothing running."""
        self._locks: WeakValueDictionary[AdapterKey, asyncio.Lock] = WeakValueDictionary()

    async def run(self, adapter: AdapterKey, change: Callable[[], Awaitable[_Result]]) -> _Result:
        """Return what `change` returns, once earlier changes of the adapter are done.

        Cancellation: is raised only when the change is done.
        """
        task = asyncio.ensure_future(self._run(adapter, change))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Its own error, if any, is of no use to a caller that has gone.
            await asyncio.gather(task, return_exceptions=True)
            raise

    async def _run(self, adapter: AdapterKey, change: Callable[[], Awaitable[_Result]]) -> _Result:
        async with self._locks.setdefault(adapter, asyncio.Lock()):
            return await change()
