"""The event loop a client's calls run on: one background thread."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar('_Result')


class LoopThread:
    """An event loop in a daemon thread of its own.

    Coroutines start in the order they are submitted and see the submitter's context variables.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name='twinkle-client', daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Start `coroutine`; cancelling the future cancels it.

        Raises:
            RuntimeError: the thread has been stopped.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError('the client is closed')
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `coroutine` and wait for it; an interrupt of the waiting thread cancels it.

        Raises:
            RuntimeError: called from a coroutine of this loop, which would wait for itself.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError('a blocking call inside a coroutine of the client; use its .aio form')
        future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self) -> None:
        """Cancel what runs and end the thread; stopping again does nothing."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
