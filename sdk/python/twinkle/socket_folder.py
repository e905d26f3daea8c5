"""Temporary folders for the Unix sockets of a process, which a later process removes if their owner was killed."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

__all__ = ['SocketFolder']

_MAX_PARENT_BYTES = 45
"""Longest path of the parent folder; the system limits the path of a socket to about 100 bytes."""
_MIN_AGE = timedelta(minutes=1)
"""Age below which an unlocked folder may belong to a process that is starting."""


class SocketFolder:
    """A new folder that only the user of this process can enter.

    The process holds a lock on the folder until it calls `remove` or ends, also by SIGKILL. The constructor removes
    folders of the same kind and user that are not locked.

    Args:
        kind: beginning of the folder's name.
        parent: folder in which the folder is created; by default, the system's temporary folder, or /tmp if the path of
            a socket in it would be too long.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(self, kind: str, *, parent: Path | None = None) -> None:
        parent = parent or _default_parent()
        _remove_abandoned(kind, parent)
        self.path = Path(tempfile.mkdtemp(prefix=kind, dir=parent))
        self._process_id = os.getpid()
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Remove the folder. Has no effect in a forked child, or if the folder was removed before."""
        if self._process_id != os.getpid():
            return
        self._process_id = 0
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _default_parent() -> Path:
    default = tempfile.gettempdir()
    return Path(default if len(os.fsencode(default)) <= _MAX_PARENT_BYTES else '/tmp')  # noqa: S108 (mkdtemp is safe)


def _remove_abandoned(kind: str, parent: Path) -> None:
    for path in parent.glob(f'{kind}*'):
        # Another process may remove the same folder, and a folder of another user cannot be opened.
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(descriptor)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime >= _MIN_AGE.total_seconds():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
