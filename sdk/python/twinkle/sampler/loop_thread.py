"""An event loop in a separate thread, for calling asynchronous engines from synchronous code."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from twinkle.blocking import join, run_in, run_until_done

_Result = TypeVar('_Result')


class LoopThread:
    """Runs coroutines for callers in other threads.

    Concurrency: call `run` and `iterate` from any thread except the loop's own.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=run_until_done, args=(self._loop, self._end), name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine and return its result or raise its error. Interrupting the caller cancels the coroutine."""
        return run_in(self._loop, coroutine)

    def iterate(self, items: AsyncGenerator[_Result, None]) -> Iterator[_Result]:
        """Yield the items of an asynchronous generator on demand. Closing the iterator closes the generator."""
        try:
            while True:
                try:
                    item = self.run(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            self.run(items.aclose())

    def close(self) -> None:
        """Stop the thread and abandon running coroutines. Closing again has no effect."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.cancel)
            join(self._thread)
            self._loop.close()


async def _next(items: AsyncGenerator[_Result, None]) -> _Result:
    return await anext(items)
