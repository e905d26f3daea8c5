"""Work with rows and files off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


class Threads:
    """A few threads that read, tokenise and write."""

    def __init__(self, count: int) -> None:
        """Use at most `count` threads."""
        self._executor = ThreadPoolExecutor(max_workers=count, thread_name_prefix='rows')

    async def run(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Return `function(*args, **kwargs)`, run in a thread; its exceptions are raised here.

        Cancellation: the function goes on to its end; only its result is dropped.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """End the threads once their functions return."""
        self._executor.shutdown(wait=True, cancel_futures=True)
