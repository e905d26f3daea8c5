"""Counts the readers and writers of each folder, so that readers can finish even if the folder is deleted.

A local disk does not need the counts, because open files stay readable after deletion. On a remote store, deletion of a
folder is deferred until its last reader closes. If the process crashes before that, the folder remains without a
record, and the next start removes it.
"""

from collections import Counter
from collections.abc import Callable
from threading import Lock

from twinkle_services.checkpoint.backends.disk import Disk


class OpenFolders:
    """Counts the readers and writers of folders. Concurrency: may be used from any thread."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._lock = Lock()
        self._readers: Counter[str] = Counter()
        self._deleted: set[str] = set()
        self._written: set[str] = set()

    def begin_writing(self, folder: str) -> None:
        """Record that a writer fills a folder that no record names yet."""
        with self._lock:
            self._written.add(folder)

    def end_writing(self, folder: str) -> None:
        """Record that the writer of a folder has finished."""
        with self._lock:
            self._written.discard(folder)

    def is_being_written(self, folder: str) -> bool:
        """Return whether a writer fills a folder."""
        with self._lock:
            return folder in self._written

    def hold(self, folder: str) -> Callable[[], None]:
        """Register a reader of a folder, and return the function that the reader calls once when it closes.

        Raises:
            FileNotFoundError: The folder is being deleted.
        """
        with self._lock:
            if folder in self._deleted:
                raise FileNotFoundError(folder)
            self._readers[folder] += 1
        return lambda: self._release(folder)

    def remove(self, folder: str) -> None:
        """Remove a folder with its content now, or when its last reader closes."""
        with self._lock:
            self._deleted.add(folder)
            is_read = self._readers[folder] > 0
        if self._disk.keeps_open_files or not is_read:
            self._remove(folder)

    def _release(self, folder: str) -> None:
        with self._lock:
            self._readers[folder] -= 1
            is_last = not self._readers[folder]
            if is_last:
                del self._readers[folder]
            is_due = is_last and folder in self._deleted and not self._disk.keeps_open_files
        if is_due:
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        self._disk.remove(folder)
        with self._lock:
            self._deleted.discard(folder)
