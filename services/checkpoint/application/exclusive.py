"""Mutual exclusion of changes: an adapter has at most one running change, and a started change always completes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from services.checkpoint.domain import AdapterKey

_Result = TypeVar('_Result')


class Exclusive:
    """Runs changes of adapters; changes of different adapters run concurrently.

    A change that has begun is not cancelled together with its caller, because it must leave the store and the catalogue
    consistent with each other.

    Concurrency: use it from one event loop only.
    """

    def __init__(self) -> None:
        # A lock exists as long as a change holds it or waits for it.
        self._locks: WeakValueDictionary[AdapterKey, asyncio.Lock] = WeakValueDictionary()

    async def run(self, adapter: AdapterKey, change: Callable[[], Awaitable[_Result]]) -> _Result:
        """Wait for earlier changes of the adapter, run `change` and return its result.

        Cancellation takes effect only after the change has completed.
        """
        task = asyncio.ensure_future(self._run(adapter, change))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # An error of the change is dropped: the caller that would receive it has been cancelled.
            await asyncio.gather(task, return_exceptions=True)
            raise

    async def _run(self, adapter: AdapterKey, change: Callable[[], Awaitable[_Result]]) -> _Result:
        async with self._locks.setdefault(adapter, asyncio.Lock()):
            return await change()
