"""Threads for blocking work: several for files, or a single one for an engine."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


async def completed(work: Awaitable[_Result]) -> _Result:
    """Await work and return its result. Cancellations take effect only after the work has completed."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # The caller may be cancelled more than once.
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        # Retrieve the exception, so that asyncio does not log it: a cancelled caller cannot receive it.
        _ = task.cancelled() or task.exception()
        raise


class Threads:
    """Runs functions in a fixed number of dedicated threads.

    Concurrency: many tasks may await `run`; calls queue while no thread is free.
    """

    def __init__(self, name: str, *, count: int) -> None:
        """Create at most `count` threads whose names begin with `name`."""
        self._executor = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)

    async def run(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Run `function(*args, **kwargs)` in a thread and return its result.

        Cancellation: a running function runs to completion, and its result is discarded.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Cancel queued calls, wait until the running functions return, and stop the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class SingleWorker(Threads):
    """Runs calls in one thread, in the order in which they were made."""

    def __init__(self, name: str) -> None:
        super().__init__(name, count=1)
