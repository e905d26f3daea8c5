"""Folders that are being read, where deleting a file takes it from its readers.

A local disk needs none of this: what is open there stays. On an object store a folder that is
deleted while it is read goes when its last reader has closed it. A crash in between leaves a folder
that no record names, and those are removed at the next start.
"""

from collections import Counter
from collections.abc import Callable
from threading import Lock

from services.checkpoint.backends.disk import Disk


class OpenFolders:
    """Counts readers. Concurrency: for many threads."""

    def __init__(self, disk: Disk) -> None:
        """Watch over folders of `disk`."""
        self._disk = disk
        self._lock = Lock()
        self._readers: Counter[str] = Counter()
        self._doomed: set[str] = set()

    def hold(self, folder: str) -> Callable[[], None]:
        """Keep a folder until what is returned is called, once.

        Raises:
            FileNotFoundError: it is being deleted.
        """
        with self._lock:
            if folder in self._doomed:
                raise FileNotFoundError(folder)
            self._readers[folder] += 1
        return lambda: self._release(folder)

    def remove(self, folder: str) -> None:
        """Remove a folder and all in it, now or when nobody reads it any more."""
        with self._lock:
            self._doomed.add(folder)
            is_read = self._readers[folder] > 0
        if self._disk.keeps_open_files or not is_read:
            self._remove(folder)

    def _release(self, folder: str) -> None:
        with self._lock:
            self._readers[folder] -= 1
            is_last = not self._readers[folder]
            if is_last:
                del self._readers[folder]
            is_due = is_last and folder in self._doomed and not self._disk.keeps_open_files
        if is_due:
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        self._disk.remove(folder)
        with self._lock:
            self._doomed.discard(folder)
