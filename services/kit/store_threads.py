"""Converts the errors of a disk that cannot be used at the moment, and runs the functions of a store in threads."""

import asyncio
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import structlog

from twinkle_services.kit.errors import StoreUnavailable
from twinkle_services.kit.worker import Threads

_log = structlog.get_logger('store')

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')

_PROBLEMS = {
    errno.ENOSPC: 'its disk is full',
    errno.EDQUOT: 'its disk quota is used up',
    errno.EFBIG: 'the file would exceed the size limit of the process',
    errno.EROFS: 'its disk is read-only',
    errno.EACCES: 'access to its folder is denied',
    errno.EPERM: 'access to its folder is denied',
    errno.EIO: 'its disk reports an error',
    errno.EMFILE: 'too many files are open in this process',
    errno.ENFILE: 'too many files are open on this host',
    errno.ENOMEM: 'the host has too little memory',
}
"""System errors after which a store has undone its change, with their descriptions for callers."""


@contextmanager
def store_errors() -> Iterator[None]:
    """Convert the errors of a disk that cannot be used at the moment. Other errors of the system are raised unchanged.

    Raises:
        StoreUnavailable: The disk is full, read-only, broken or inaccessible, a disk quota or file size limit is
            exceeded, too many files are open, or memory is exhausted.
    """
    try:
        yield
    except OSError as error:
        problem = _PROBLEMS.get(error.errno or 0)
        if problem is None:
            raise
        _log.error('store unavailable', error=str(error))
        raise StoreUnavailable(problem) from error


async def run_in_store_thread(
    function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """Run `function(*args, **kwargs)` in a thread and return its result; see `asyncio.to_thread`.

    Raises:
        StoreUnavailable: See `store_errors`.
    """
    with store_errors():
        return await asyncio.to_thread(function, *args, **kwargs)


class StoreThreads(Threads):
    """Threads that access a store; their errors are converted with `store_errors`."""

    async def run(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Run `function(*args, **kwargs)` in a thread and return its result; see `Threads.run`.

        Raises:
            StoreUnavailable: See `store_errors`.
        """
        with store_errors():
            return await super().run(function, *args, **kwargs)
