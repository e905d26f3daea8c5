"""One thread for one engine: heavy work leaves the event loop and keeps its order."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


class SingleWorker:
    """Runs functions one after the other in a thread of its own.

    Concurrency: `run` may be awaited from many tasks; calls run in the order they came. A
    function that has begun is never interrupted: cancelling the awaiting task only drops the
    result.
    """

    def __init__(self, name: str) -> None:
        """Make a worker whose thread is called `name`."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Return `function(*args, **kwargs)`, run in the worker's thread; its exceptions are raised here."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Drop what waits and end the thread once the running function returns."""
        self._executor.shutdown(wait=True, cancel_futures=True)
