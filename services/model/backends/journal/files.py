"""Files that are whole or not there: written aside, synced, renamed, and the folder synced."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from services.kit.ids import new_id

_ASIDE = '.half-'
"""Prefix of files that are being written."""


class Folder:
    """Files of one folder. Safe for several threads."""

    def __init__(self, path: Path, *, sync: Callable[[int], None] = os.fsync) -> None:
        """Use the folder at `path`, made if need be; `sync` makes what a descriptor has written durable."""
        self.path = path
        self._sync = sync
        path.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file, durably; one of that name is replaced.

        Raises:
            OSError: the disk refused it; nothing is there.
        """
        aside = self.path / f'{_ASIDE}{new_id(name[:16])}'
        try:
            with aside.open('xb') as file:
                for part in parts:
                    file.write(part)
                file.flush()
                self._sync(file.fileno())
            aside.rename(self.path / name)
            self.sync()
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def sync(self) -> None:
        """Make names that were added or taken away durable."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            self._sync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, name: str) -> bytes:
        """Return a file.

        Raises:
            FileNotFoundError: there is none.
        """
        return (self.path / name).read_bytes()

    def drop(self, name: str) -> None:
        """Take a file away, if it is there; after a loss of power it may be back."""
        (self.path / name).unlink(missing_ok=True)

    def sweep(self, wanted: set[str]) -> int:
        """Take away every file that is not wanted, half-written ones included; return how many there were."""
        unwanted = [path for path in self.path.iterdir() if path.name not in wanted]
        for path in unwanted:
            path.unlink()
        return len(unwanted)
