"""The state folder of a stack: its lock, its free space, its mode, and errors about it."""

import errno
import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from twinkle_client.stack.hosts import StackError
from twinkle_client.stack.options import StackOptions
from twinkle_client.stack.state import key_path

_SUBFOLDERS = ('config', 'data', 'logs', 'run', 'tls', 'traces')
"""Subfolders of a state folder."""
_LOCK_SECONDS = 3.0
_POLL_SECONDS = 0.05


class StackBusyError(StackError):
    """Another program is starting or stopping services in this state folder."""


def check_free_space(options: StackOptions) -> None:
    """Check that the disk has enough free space for a stack.

    Raises:
        StackError: The disk has less free space than `min_free_bytes`.
    """
    free_bytes, needed_bytes = shutil.disk_usage(options.state_dir).free, options.min_free_bytes
    if free_bytes < needed_bytes:
        raise StackError(
            f'the disk of {options.state_dir} has {free_bytes >> 20} MiB of free space, and a stack needs at least '
            f'{needed_bytes >> 20} MiB; free some space, choose another folder with --state-dir, or set min_free_bytes'
        )


def folder_problem(folder: Path, error: OSError) -> str:
    """Return an error message: why a state folder cannot be written, and what to do."""
    advice = {
        errno.ENOSPC: 'its disk is full; free some space',
        errno.EDQUOT: 'the disk quota is used up; free some space',
        errno.EROFS: 'it is on a read-only file system',
        errno.EACCES: 'this user may not write to it',
        errno.EPERM: 'this user may not write to it',
        errno.EEXIST: 'a file has its name',
        errno.ENOTDIR: 'a part of its path is a file',
    }
    reason = advice.get(error.errno or 0, f'{error.strerror or error}')
    return f'cannot write to the state folder {folder}: {reason}, or choose another folder with --state-dir'


def make_private(folder: Path) -> None:
    """Create the folder and its subfolders for the owner only; a non-empty folder without a stack keeps its mode."""
    folder.mkdir(parents=True, exist_ok=True)
    if key_path(folder).exists() or not any(folder.iterdir()):
        folder.chmod(0o700)
    for name in _SUBFOLDERS:
        (folder / name).mkdir(mode=0o700, exist_ok=True)


@contextmanager
def locked(folder: Path, *, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Hold the exclusive lock of a state folder during the block.

    Args:
        folder: The state folder.
        seconds: Longest wait for another program that holds the lock.

    Raises:
        StackBusyError: Another program held the lock for longer than `seconds`.
    """
    end = time.monotonic() + seconds
    with (folder / 'lock').open('w') as file:
        while not _is_locked(file):
            if time.monotonic() > end:
                raise StackBusyError(f'another `twinkle up` or `twinkle down` is using {folder}; try again later')
            time.sleep(_POLL_SECONDS)
        yield


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
