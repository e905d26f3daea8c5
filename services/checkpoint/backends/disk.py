"""Durable files through fsspec: on a local disk, in an S3 bucket, or in any other store that fsspec supports.

On a local disk a written file is synced and a replaced one is renamed into place, so that a crash leaves either the
old content or the new. A remote store guarantees this without further steps: an object becomes visible only when its
upload is complete.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self, cast

import fsspec.core
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from twinkle_services.kit.disk_space import check_free_space

_S3_DEFAULTS = {
    # A cached listing would lack newly written files and contain deleted ones.
    'use_listings_cache': False,
    # Buffer size of a reader or writer, and size of an upload part. S3 allows 10,000 parts, so a file may have up to
    # 78 GiB.
    'default_block_size': 8 << 20,
}


def open_disk(url: str, options: Mapping[str, Any] | None = None, *, are_paths_shown: bool = True) -> 'Disk':
    """Return the disk whose root is `url`; nothing is read or written yet.

    Args:
        url: A path, or a URL that fsspec supports, such as `s3://bucket/folder`.
        options: Options of fsspec's file system, such as `endpoint_url`, `key` and `secret` for S3.
        are_paths_shown: Whether `local_path` returns the paths of local files.
    """
    # fsspec ships no types.
    core: Any = fsspec.core
    defaults = _S3_DEFAULTS if url.startswith('s3://') else {}
    file_system, root = core.url_to_fs(url, **{**defaults, **(options or {})})
    if isinstance(file_system, LocalFileSystem):
        return LocalDisk(file_system, str(root), are_paths_shown=are_paths_shown)
    return RemoteDisk(file_system, str(root))


class Disk(ABC):
    """Files below one root. Names are relative to the root, with forward slashes."""

    keeps_open_files: bool
    """Whether a file that is being read stays readable after it is deleted."""

    def __init__(self, file_system: Any, root: str) -> None:
        self._fs = file_system
        self._root = root.rstrip('/')

    def names(self, folder: str) -> list[str]:
        """Return the sorted paths of all files and folders below `folder`, at any depth, relative to `folder`."""
        self._fs.invalidate_cache()
        top = self._path(folder)
        if not self._fs.exists(top):
            return []
        found: list[str] = self._fs.find(top, withdirs=True)
        return sorted(path.removeprefix(f'{top}/') for path in found if path != top)

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        return self._fs.cat_file(self._path(name))

    def size_bytes(self, name: str) -> int:
        """Return the size of a file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        return int(self._fs.info(self._path(name))['size'])

    def open_to_read(self, name: str) -> IO[bytes]:
        """Open a file for reading. It may be deleted while it is open only if `keeps_open_files` is true.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        return self._fs.open(self._path(name), 'rb')

    def open_to_write(self, name: str) -> IO[bytes]:
        """Open a new file and create its parent folders; close it with `close_synced` or `abandon`."""
        return self._fs.open(self._path(name), 'wb')

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content; do nothing if it does not exist."""
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    @abstractmethod
    def remove_empty_folder(self, name: str) -> None:
        """Remove a folder if it exists and is empty; its parents remain."""

    @abstractmethod
    def check_free_space(self, size_bytes: int) -> None:
        """Check that there is enough space for new data.

        Raises:
            DiskFull: There is too little space.
        """

    @abstractmethod
    def unsynced(self) -> 'Disk':
        """Return this disk without syncs: data survives a crash of the process, but may not survive a power failure."""

    @abstractmethod
    def local_path(self, name: str) -> str:
        """Return the path of a file or folder on this machine; empty if it is stored elsewhere or not shown."""

    @abstractmethod
    def close_synced(self, file: IO[bytes]) -> None:
        """Close a written file and wait until it is durable."""

    @abstractmethod
    def abandon(self, file: IO[bytes]) -> None:
        """Close a file opened for writing without completing it; `remove` it afterwards."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a file and make its content durable; `sync_folder` makes its name durable."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a file atomically and durably: a crash leaves either the old content or the new."""

    @abstractmethod
    def sync_folder(self, name: str) -> None:
        """Make the entries of a folder, and of its parents below the root, durable."""

    @abstractmethod
    def sync_files(self, folder: str) -> None:
        """Make the files of a folder that were written without syncs durable."""

    @abstractmethod
    def remove_unfinished_uploads(self, folder: str) -> None:
        """Remove the parts of interrupted uploads, which are not listed as files."""

    def _path(self, name: str) -> str:
        return f'{self._root}/{name}'


class LocalDisk(Disk):
    """Files on this machine; writes are synced unless the disk was returned by `unsynced`."""

    keeps_open_files = True

    def __init__(self, file_system: Any, root: str, *, is_synced: bool = True, are_paths_shown: bool = True) -> None:
        super().__init__(file_system, root)
        self._is_synced = is_synced
        self._are_paths_shown = are_paths_shown

    def remove_empty_folder(self, name: str) -> None:
        with suppress(OSError):
            Path(self._path(name)).rmdir()

    def check_free_space(self, size_bytes: int) -> None:
        check_free_space(Path(self._root), size_bytes)

    def unsynced(self) -> 'LocalDisk':
        return LocalDisk(self._fs, self._root, is_synced=False, are_paths_shown=self._are_paths_shown)

    def local_path(self, name: str) -> str:
        return self._path(name) if self._are_paths_shown else ''

    def open_to_write(self, name: str) -> IO[bytes]:
        self._fs.makedirs(self._path(name).rpartition('/')[0], exist_ok=True)
        return super().open_to_write(name)

    def close_synced(self, file: IO[bytes]) -> None:
        file.flush()
        if self._is_synced:
            os.fsync(file.fileno())
        file.close()

    def abandon(self, file: IO[bytes]) -> None:
        # Closing a file writes its buffer. The write fails on a full disk, but the descriptor is closed nevertheless.
        with suppress(OSError):
            file.close()

    def write(self, name: str, data: bytes) -> None:
        file = self.open_to_write(name)
        file.write(data)
        self.close_synced(file)

    def replace(self, name: str, data: bytes) -> None:
        self.write(f'{name}.new', data)
        Path(self._path(f'{name}.new')).replace(self._path(name))
        self.sync_folder(name.rpartition('/')[0])

    def sync_folder(self, name: str) -> None:
        while self._is_synced and name:
            _sync(self._path(name))
            name = name.rpartition('/')[0]

    def sync_files(self, folder: str) -> None:
        for name in self.names(folder):
            _sync(self._path(f'{folder}/{name}'))
        self.sync_folder(folder)

    def remove_unfinished_uploads(self, folder: str) -> None:
        """Do nothing: an interrupted write leaves a file, which `names` lists like any other."""


class RemoteDisk(Disk):
    """Objects in a remote store, which are durable and complete as soon as they are visible."""

    keeps_open_files = False

    def remove_empty_folder(self, name: str) -> None:
        """Do nothing: a folder of a remote store exists only as long as it has objects."""

    def check_free_space(self, size_bytes: int) -> None:
        """Do nothing: the space of a remote store is not known."""

    def unsynced(self) -> Self:
        return self

    def local_path(self, name: str) -> str:
        return ''

    def close_synced(self, file: IO[bytes]) -> None:
        file.flush()
        file.close()

    def abandon(self, file: IO[bytes]) -> None:
        buffered: Any = file
        if isinstance(buffered, AbstractBufferedFile):
            # `close` would upload the remaining buffer and complete the object.
            buffered.discard()
            buffered.closed = True
        else:
            file.close()

    def write(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(name), data)

    def replace(self, name: str, data: bytes) -> None:
        self.write(name, data)

    def sync_folder(self, name: str) -> None:
        """Do nothing: objects are durable once they are visible."""

    def sync_files(self, folder: str) -> None:
        """Do nothing: objects are durable once they are visible."""

    def remove_unfinished_uploads(self, folder: str) -> None:
        bucket, _, prefix = self._path(folder).partition('/')
        for upload in self._unfinished_uploads(bucket, f'{prefix}/'):
            with suppress(FileNotFoundError):
                self._fs.abort_mpu(bucket, upload['Key'], upload['UploadId'])

    def _unfinished_uploads(self, bucket: str, prefix: str) -> Iterator[Mapping[str, str]]:
        markers: dict[str, str] = {}
        while hasattr(self._fs, 'list_multipart_uploads'):
            # `list_multipart_uploads` of s3fs returns only the first thousand.
            response = self._fs.call_s3('list_multipart_uploads', Bucket=bucket, Prefix=prefix, **markers)
            yield from cast(list[Mapping[str, str]], response.get('Uploads', []))
            if not response.get('IsTruncated'):
                return
            markers = {'KeyMarker': response['NextKeyMarker'], 'UploadIdMarker': response['NextUploadIdMarker']}


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
