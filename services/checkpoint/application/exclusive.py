"""Mutual exclusion of changes: an adapter has at most one running change, and a started change always completes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from twinkle_services.checkpoint.domain import AdapterKey
from twinkle_services.kit.worker import completed

_Result = TypeVar('_Result')


class Exclusive:
    """Runs changes of adapters; changes of different adapters run concurrently.

    A change is not cancelled together with its caller, because it must leave the store and the catalogue consistent
    with each other.

    Concurrency: use it from one event loop only.
    """

    def __init__(self) -> None:
        # A lock exists as long as a change holds it or waits for it.
        self._locks: WeakValueDictionary[AdapterKey, asyncio.Lock] = WeakValueDictionary()

    async def run(self, adapter: AdapterKey, change: Callable[[], Awaitable[_Result]]) -> _Result:
        """Wait for earlier changes of the adapter, run `change` and return its result.

        Cancellation takes effect only after the change has completed.
        """
        return await completed(self._run(adapter, change))

    async def _run(self, adapter: AdapterKey, change: Callable[[], Awaitable[_Result]]) -> _Result:
        async with self._locks.setdefault(adapter, asyncio.Lock()):
            return await change()
