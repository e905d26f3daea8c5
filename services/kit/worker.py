"""Threads for blocking work: several for files, or a single one for an engine."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


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
        """Cancel queued calls and stop the threads once their functions return."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class SingleWorker(Threads):
    """Runs calls in one thread, in the order in which they were made."""

    def __init__(self, name: str) -> None:
        super().__init__(name, count=1)
