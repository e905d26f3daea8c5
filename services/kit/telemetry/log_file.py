"""The file to which the output of a process is appended, with a bounded size."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

_CHECK_SECONDS = 0.5
"""Time between two checks of the size."""
_COPY_BYTES = 1 << 20


class LogFile:
    """Receives standard output and standard error of this process and of its children.

    A file above the limit is copied to `<name>.old` and emptied, so both files together take at most about twice the
    limit. The file is not renamed, because native libraries and children keep it open and would write to the renamed
    file.

    Concurrency: only one process may limit the size of a file; any number of processes may append to it.
    """

    def __init__(self, path: Path, *, limit_bytes: int) -> None:
        self._path = path
        self._old_path = path.with_name(f'{path.name}.old')
        self._limit_bytes = limit_bytes

    def open(self) -> None:
        """Redirect the output of this process to the file, and bound its size until the process exits.

        Raises:
            OSError: The file cannot be opened.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        # A thread checks the size, because native libraries and children also write to the file.
        threading.Thread(target=self._keep_bounded, name='log-file', daemon=True).start()

    def _keep_bounded(self) -> None:
        while True:
            # A full disk or a deleted file must not end the thread.
            with suppress(OSError):
                if self._path.stat().st_size > self._limit_bytes:
                    self._rotate()
            time.sleep(_CHECK_SECONDS)

    def _rotate(self) -> None:
        # The previous copy is deleted first, so that an almost full disk has room for the new one.
        self._old_path.unlink(missing_ok=True)
        with self._path.open('rb') as source, self._old_path.open('wb') as target:
            while data := source.read(_COPY_BYTES):
                target.write(data)
            # Lines that are written between the last read and this call are lost.
            os.truncate(self._path, 0)
