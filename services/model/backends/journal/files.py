"""Writes files atomically and durably: each file is written under a temporary name, synced, and renamed."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from twinkle_services.kit.ids import new_id
from twinkle_services.kit.telemetry import measures

_TEMPORARY = '.half-'
"""Prefix of temporary files."""
_COPIED_BYTES = 8 << 20
"""Number of bytes that are copied at once."""


class Folder:
    """Files in one folder. Concurrency: thread-safe."""

    def __init__(self, path: Path, *, sync: Callable[[int], None] = os.fsync) -> None:
        """Open or create the folder at `path`; `sync` flushes a file descriptor to disk."""
        self.path = path
        self._sync = sync
        path.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file durably, replacing an existing one.

        Raises:
            OSError: Writing failed; the file is not durable.
        """
        temporary = self.path / f'{_TEMPORARY}{new_id(name[:16])}'
        try:
            with temporary.open('xb') as file:
                for part in parts:
                    file.write(part)
                file.flush()
                self._sync(file.fileno())
                size_bytes = file.tell()
            temporary.rename(self.path / name)
            self.sync()
            measures.journal_bytes.add(size_bytes, 'file')
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def adopt(self, source: Path) -> None:
        """Add a file of another folder under its name, durably, as a hard link if possible; keep an existing file.

        A file does not change after it has been renamed, so both folders can share it.

        Raises:
            FileNotFoundError: There is no such file.
            OSError: Writing failed; the file is not durable.
        """
        if (self.path / source.name).exists():
            return
        try:
            (self.path / source.name).hardlink_to(source)
            self.sync()
        except FileNotFoundError:
            raise
        except OSError:
            # The folders are on different file systems, or their file system has no hard links.
            with source.open('rb') as file:
                self.write(source.name, iter(lambda: file.read(_COPIED_BYTES), b''))

    def sync(self) -> None:
        """Make the names of added and deleted files durable."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            self._sync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: There is no such file.
        """
        return (self.path / name).read_bytes()

    def drop(self, name: str) -> None:
        """Delete a file if it exists; it may reappear after a power loss."""
        (self.path / name).unlink(missing_ok=True)

    def sweep(self, used_names: set[str]) -> int:
        """Delete all files that are not in `used_names`, including temporary ones, and return their number."""
        unused = [path for path in self.path.iterdir() if path.name not in used_names]
        for path in unused:
            path.unlink()
        return len(unused)
