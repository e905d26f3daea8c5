"""Converts errors of the library and of the disk to domain errors, and creates the errors for missing states."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import structlog

from services.checkpoint.domain import CheckpointKey, VersionKey
from services.checkpoint.domain.errors import StoreUnavailable
from services.kit.errors import (
    CheckpointNotFound,
    ChunkCorrupt,
    DigestMismatch,
    InvalidField,
    NotFound,
    StreamOutOfOrder,
    VersionNotFound,
)
from services.kit.worker import Threads
from twinkle import checkpoint_engine as engine

_log = structlog.get_logger('store')

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')

_PROBLEMS = {
    errno.ENOSPC: 'its disk is full',
    errno.EDQUOT: 'its disk quota is used up',
    errno.EFBIG: 'the file would exceed the size limit of the process',
    errno.EROFS: 'its disk is read-only',
    errno.EACCES: 'its folder is not writable',
    errno.EMFILE: 'too many files are open in this process',
    errno.ENFILE: 'too many files are open on this host',
    errno.ENOMEM: 'the host has too little memory',
}
"""Errors of the disk after which nothing was stored, and their descriptions for callers."""


class StoreThreads(Threads):
    """Threads that access the store; they convert the errors of a disk that cannot be used at the moment."""

    async def run(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Run `function(*args, **kwargs)` in a thread and return its result; see `Threads.run`.

        Raises:
            StoreUnavailable: The disk is full or read-only, or too many files are open.
        """
        try:
            return await super().run(function, *args, **kwargs)
        except OSError as error:
            problem = _PROBLEMS.get(error.errno or 0)
            if problem is None:
                raise
            _log.error('store unavailable', error=str(error))
            raise StoreUnavailable(problem) from error


@contextmanager
def domain_errors() -> Iterator[None]:
    """Convert the library's errors about chunks and digests to domain errors."""
    try:
        yield
    except engine.ChunkCorrupt as error:
        raise ChunkCorrupt(error.offset) from error
    except engine.ChunkOutOfOrder as error:
        raise StreamOutOfOrder.at_byte(error.expected) from error
    except engine.ChunkOutOfRange as error:
        problem = f'ends at byte {error.end}, but the state has {error.size_bytes} bytes'
        raise InvalidField('frame.chunk', problem) from error
    except engine.StateIncomplete as error:
        raise StreamOutOfOrder.at_byte(error.next_offset) from error
    except engine.DigestMismatch as error:
        raise DigestMismatch(error.expected, error.actual) from error


def not_found(key: VersionKey | CheckpointKey) -> NotFound:
    """Return the error for a version or checkpoint that does not exist."""
    if isinstance(key, VersionKey):
        return VersionNotFound(key.adapter.adapter_id, key.version)
    return CheckpointNotFound(key.checkpoint_id)
