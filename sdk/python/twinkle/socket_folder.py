"""Temporary folders for the Unix sockets of a process. If the process is killed, a later process removes its folder."""

import errno
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
_NO_LOCKS = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK})
"""System errors of file systems without locks, such as some network file systems."""
_MIN_AGE = timedelta(minutes=1)
"""Age below which an unlocked folder may belong to a process that is starting."""


class SocketFolder:
    """A new folder that only the user of this process can enter.

    The process holds a lock on the folder until it calls `remove` or ends, even if it is killed. The constructor
    removes folders of the same kind and user that are not locked.

    Args:
        kind: beginning of the folder's name.
        parent: folder in which the folder is created; by default, the system's temporary folder, or /tmp if the path of
            a socket in it would be too long, or if its file system has no locks.

    Raises:
        OSError: the folder cannot be created, or cannot be locked.
    """

    def __init__(self, kind: str, *, parent: Path | None = None) -> None:
        parents = [parent] if parent is not None else _default_parents()
        if not any(self._create(kind, folder) for folder in parents):
            tried = ' and '.join(map(str, parents))
            raise OSError(errno.ENOTSUP, f'no file locks in {tried}; set TMPDIR to a folder on a local disk')
        self._process_id = os.getpid()

    def _create(self, kind: str, parent: Path) -> bool:
        """Create and lock the folder, or return False if the file system does not support locks."""
        _remove_abandoned(kind, parent)
        self.path = Path(tempfile.mkdtemp(prefix=kind, dir=parent))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        except OSError as error:
            os.close(self._descriptor)
            self.path.rmdir()
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def remove(self) -> None:
        """Remove the folder. Has no effect in a forked child, or if the folder was removed before."""
        if self._process_id != os.getpid():
            return
        self._process_id = 0
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _default_parents() -> list[Path]:
    """Return the folders to try, in order."""
    default, short = Path(tempfile.gettempdir()), Path('/tmp')  # noqa: S108 (mkdtemp is safe)
    return [short] if default == short or len(os.fsencode(default)) > _MAX_PARENT_BYTES else [default, short]


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
