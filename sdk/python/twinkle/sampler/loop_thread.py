"""An event loop in a thread of its own, for engines that need one behind calls that do not."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

_Result = TypeVar('_Result')


class LoopThread:
    """Runs coroutines for callers of other threads.

    Concurrency: `run` and `iterate` from any thread but its own.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine and return what it returns; an interrupted caller cancels it.

        Raises:
            BaseException: what the coroutine raises.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[_Result, None]) -> Iterator[_Result]:
        """Yield the items of a generator, asking for each when it is wanted; closing it closes the generator."""
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
        """End the thread; what still runs in it is dropped. Twice is no error."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _next(items: AsyncGenerator[_Result, None]) -> _Result:
    return await anext(items)
