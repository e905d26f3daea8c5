"""Durable files through fsspec: a local disk, or whatever else fsspec reaches.

On a local disk a written file is synced and a replaced one is renamed into place, so a crash
leaves the old content or the new. An object store gives the same by itself.
"""

import copy
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import fsspec.core
from fsspec.implementations.local import LocalFileSystem


class Disk:
    """Files below one root; names are relative to it, with forward slashes."""

    def __init__(self, url: str) -> None:
        """Use the folder at `url`: a path, or what fsspec understands."""
        # fsspec ships no types.
        core: Any = fsspec.core
        self._fs, root = core.url_to_fs(url)
        self._root = str(root).rstrip('/')
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._is_hasty = False

    def hasty(self) -> Self:
        """Return this disk without the syncs: what is written outlives the process, not the machine."""
        twin = copy.copy(self)
        twin._is_hasty = True  # noqa: SLF001 (of its own class)
        return twin

    def local_path(self, name: str) -> str:
        """Return where a file or folder is on this machine; empty where it is elsewhere."""
        return self._path(name) if self._is_local else ''

    def names(self, folder: str) -> list[str]:
        """Return every file and folder below `folder`, at any depth, relative to it."""
        self._fs.invalidate_cache()
        top = self._path(folder)
        if not self._fs.exists(top):
            return []
        found: list[str] = self._fs.find(top, withdirs=True)
        return sorted(path.removeprefix(f'{top}/') for path in found if path != top)

    def read(self, name: str) -> bytes:
        """Return a file.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._fs.cat_file(self._path(name))

    def size_bytes(self, name: str) -> int:
        """Return a file's size.

        Raises:
            FileNotFoundError: there is none.
        """
        return int(self._fs.info(self._path(name))['size'])

    def open_to_read(self, name: str) -> IO[bytes]:
        """Open a file; on a local disk it stays readable when it is deleted.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._fs.open(self._path(name), 'rb')

    def open_to_write(self, name: str) -> IO[bytes]:
        """Open a new file, making the folders above it; end with `close_synced`."""
        path = self._path(name)
        self._fs.makedirs(path.rpartition('/')[0], exist_ok=True)
        return self._fs.open(path, 'wb')

    def close_synced(self, file: IO[bytes]) -> None:
        """Close a written file once the disk has it."""
        file.flush()
        if self._is_local and not self._is_hasty:
            os.fsync(file.fileno())
        file.close()

    def write(self, name: str, data: bytes) -> None:
        """Write a file, durably."""
        file = self.open_to_write(name)
        file.write(data)
        self.close_synced(file)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file in one step: a crash leaves the old content or the new."""
        if not self._is_local:
            self._fs.pipe_file(self._path(name), data)
            return
        self.write(f'{name}.new', data)
        Path(self._path(f'{name}.new')).replace(self._path(name))
        self.sync_folder(name.rpartition('/')[0])

    def sync_folder(self, name: str) -> None:
        """Make the entries of a folder, and of those above it up to the root, durable."""
        while self._is_local and not self._is_hasty and name:
            _sync(self._path(name))
            name = name.rpartition('/')[0]

    def sync_files(self, folder: str) -> None:
        """Make a folder that was written in haste durable."""
        if self._is_local:
            for name in self.names(folder):
                _sync(self._path(f'{folder}/{name}'))
            self.sync_folder(folder)

    def remove(self, name: str) -> None:
        """Remove a file or a whole folder; nothing happens where there is none."""
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f'{self._root}/{name}'


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
