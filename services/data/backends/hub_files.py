"""Restricts the files that the process of `hub_process.py` opens to those of its dataset.

The library `datasets` opens files by address with `fsspec`. Addresses can be chained, and parts of them are names that
the author of a dataset chose, such as those of files in a zip archive: `zip://x::/etc/file.zip` would open a file of
this machine. In this process, `fsspec` therefore has no other protocols than the ones below.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

_HUB = frozenset({'hf'})
_COMPRESSION = frozenset({'bz2', 'gzip', 'lz4', 'xz', 'zip', 'zstd'})
_LOCAL = ('file', 'local')


def confine_files(folders: Iterable[Path], *, is_hub_allowed: bool) -> None:
    """Let `fsspec` open only the given files in this process; calling it again replaces the folders.

    Args:
        folders: folders and files of this machine that may be opened.
        is_hub_allowed: whether files of Hugging Face may be opened.
    """
    allowed = _COMPRESSION | _HUB if is_hub_allowed else _COMPRESSION
    for protocol in fsspec.available_protocols():
        if protocol not in allowed and protocol not in _LOCAL:
            fsspec.register_implementation(protocol, _Refused, clobber=True)
    _InsideFolders.folders = tuple(Path(os.path.normpath(folder.absolute())) for folder in folders)
    for protocol in _LOCAL:
        fsspec.register_implementation(protocol, _InsideFolders, clobber=True)


class _Refused(fsspec.AbstractFileSystem):
    """Files that the process does not open."""

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options
        raise PermissionError('files of other machines are not read')


class _InsideFolders(LocalFileSystem):
    """Files of this machine in some folders."""

    folders: ClassVar[tuple[Path, ...]] = ()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        """Return the path of an address; every method calls this first."""
        found = cast('str', super()._strip_protocol(path))
        if not any(Path(os.path.normpath(found)).is_relative_to(folder) for folder in cls.folders):
            raise PermissionError('files outside of the dataset are not read')
        return found
