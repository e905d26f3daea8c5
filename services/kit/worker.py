"""Threads for what would hold up the event loop: a few for files, or one for an engine."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


class Threads:
    """Runs functions in a few threads of its own.

    Concurrency: `run` may be awaited from many tasks; what finds no free thread waits its turn.
    """

    def __init__(self, name: str, *, count: int) -> None:
        """Make at most `count` threads, called after `name`."""
        self._executor = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)

    async def run(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Return `function(*args, **kwargs)`, run in a thread; its exceptions are raised here.

        Cancellation: a function that has begun goes on to its end; only its result is dropped.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Drop what waits and end the threads once their functions return."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class SingleWorker(Threads):
    """One thread, so that calls run one after the other in the order they came."""

    def __init__(self, name: str) -> None:
        """Make a worker whose thread is called `name`."""
        super().__init__(name, count=1)
