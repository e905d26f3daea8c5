"""Durable files through fsspec: a local disk, an S3 bucket, or whatever else fsspec reaches.

On a local disk a written file is synced and a replaced one is renamed into place, so a crash
leaves the old content or the new. An object store gives the same by itself: an object is there
once its upload has ended, whole.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self, cast

import fsspec.core
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

_S3_DEFAULTS = {
    # A listing that is remembered would hide what was written since, or show what is gone.
    'use_listings_cache': False,
    # What a reader or writer holds in memory, and a part of an upload. 10,000 parts are the most
    # there may be, so that states of 80 GiB fit.
    'default_block_size': 8 << 20,
}


class Disk:
    """Files below one root; names are relative to it, with forward slashes."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Use a folder.

        Args:
            url: a path, or what fsspec understands, such as `s3://bucket/folder`.
            options: of fsspec's file system, such as `endpoint_url`, `key` and `secret` of S3.
        """
        # fsspec ships no types.
        core: Any = fsspec.core
        defaults = _S3_DEFAULTS if url.startswith('s3://') else {}
        self._fs, root = core.url_to_fs(url, **{**defaults, **(options or {})})
        self._root = str(root).rstrip('/')
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._is_hasty = False

    def hasty(self) -> Self:
        """Return this disk without the syncs: what is written outlives the process, not the machine."""
        twin = copy.copy(self)
        twin._is_hasty = True  # noqa: SLF001 (of its own class)
        return twin

    @property
    def keeps_open_files(self) -> bool:
        """Whether a file that is being read stays readable when it is deleted."""
        return self._is_local

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
        """Open a file; see `keeps_open_files`.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._fs.open(self._path(name), 'rb')

    def open_to_write(self, name: str) -> IO[bytes]:
        """Open a new file, making the folders above it; end with `close_synced`."""
        path = self._path(name)
        if self._is_local:
            self._fs.makedirs(path.rpartition('/')[0], exist_ok=True)
        return self._fs.open(path, 'wb')

    def abandon(self, file: IO[bytes]) -> None:
        """Close a file that was opened to write and is not wanted; `remove` it afterwards."""
        buffered: Any = file
        if isinstance(buffered, AbstractBufferedFile):
            # Closing would upload the rest of it.
            buffered.discard()
            buffered.closed = True
        else:
            file.close()

    def remove_half_uploads(self, folder: str) -> None:
        """Remove the parts of objects that no upload will finish any more, where the store keeps such."""
        bucket, _, prefix = self._path(folder).partition('/')
        for upload in self._half_uploads(bucket, f'{prefix}/'):
            with suppress(FileNotFoundError):
                self._fs.abort_mpu(bucket, upload['Key'], upload['UploadId'])

    def _half_uploads(self, bucket: str, prefix: str) -> Iterator[Mapping[str, str]]:
        place: dict[str, str] = {}
        while hasattr(self._fs, 'list_multipart_uploads'):
            # The method of that name shows the first thousand only.
            answer = self._fs.call_s3('list_multipart_uploads', Bucket=bucket, Prefix=prefix, **place)
            yield from cast(list[Mapping[str, str]], answer.get('Uploads', []))
            if not answer.get('IsTruncated'):
                return
            place = {'KeyMarker': answer['NextKeyMarker'], 'UploadIdMarker': answer['NextUploadIdMarker']}

    def close_synced(self, file: IO[bytes]) -> None:
        """Close a written file once the disk has it."""
        file.flush()
        if self._is_local and not self._is_hasty:
            os.fsync(file.fileno())
        file.close()

    def write(self, name: str, data: bytes) -> None:
        """Write a file, durably."""
        if not self._is_local:
            self._fs.pipe_file(self._path(name), data)
            return
        file = self.open_to_write(name)
        file.write(data)
        self.close_synced(file)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file in one step: a crash leaves the old content or the new."""
        if not self._is_local:
            self.write(name, data)
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
