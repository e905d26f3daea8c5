"""Stores versions in shared memory, each as a segment with a record. The versions survive a crash of the process.

Segments are files in the host's segment folder. Their records are files in a subfolder, one for each store. A version
exists once its record exists. The file `home` in the subfolder contains the path of the service's state folder: if that
path no longer exists, the next checkpoint service that starts on the host removes the store's segments.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path

import structlog

from twinkle.checkpoint_engine import WeightManifest
from twinkle_services.checkpoint.backends.record_json import (
    manifest_from_json,
    manifest_to_json,
    record_from_json,
    record_to_json,
)
from twinkle_services.checkpoint.domain import Record
from twinkle_services.kit.errors import InUse, MemoryNotShared
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.weights import Segment, SegmentRef, Segments

_log = structlog.get_logger('memory')

_FOLDER = 'checkpoint.'
"""Prefix of the names of the subfolders with records."""
_HOME = 'home'
_LOCK = 'lock'
_RECORD = '.record'
"""Suffix of a record file. The first line of the file is the manifest, and the rest is the record, both as JSON."""
_NEW = '.new'
"""Suffix of a record file while it is written."""


@dataclass(frozen=True)
class CachedVersion:
    """A version in shared memory."""

    name: str
    record: Record
    manifest: WeightManifest
    segment: Segment


class SegmentCache:
    """The segments and records of one store.

    Methods may be called from any thread. Only one process may use the cache of a store at a time.
    """

    def __init__(self, segments: Segments, *, store_url: str, home: Path) -> None:
        """Lock the cache of a store, and remove the caches of stores that no longer exist.

        Args:
            segments: The host's segment folder.
            store_url: URL that identifies the store.
            home: State folder of the service, which exists as long as the store is in use.

        Raises:
            InUse: Another process has locked the cache.
        """
        self._segments = segments
        self._owner = blake2s(f'{store_url}\0{home}'.encode(), digest_size=8).hexdigest()
        self._folder = segments.folder / f'{_FOLDER}{self._owner}'
        self._folder.mkdir(mode=0o700, exist_ok=True)
        lock = _lock(self._folder)
        if lock is None:
            raise InUse('store', store_url, 'another checkpoint service')
        self._lock = lock
        (self._folder / _HOME).write_text(str(home))
        self._sweep_others()

    @property
    def segments(self) -> Segments:
        """The host's segment folder."""
        return self._segments

    def load(self) -> list[CachedVersion]:
        """Return the versions, after removing unreadable records and segments without a record."""
        found = [cached for path in sorted(self._folder.glob(f'*{_RECORD}')) for cached in self._read(path)]
        known = {cached.name for cached in found}
        for name in self._segments.persistent_names():
            if name.startswith(f'{self._owner}.') and name not in known:
                self._segments.remove_persistent(name)
        for path in self._folder.glob(f'*{_NEW}'):
            path.unlink()
        return found

    def new_name(self) -> str:
        """Return a new name for a segment of this cache."""
        return f'{self._owner}.{new_id("seg")}'

    def create(self, name: str, size_bytes: int) -> Segment:
        """Create a segment with writable bytes.

        Raises:
            OSError: The host does not have enough memory.
        """
        return self._segments.create(size_bytes, persistent_name=name)

    def adopt(self, name: str, ref: SegmentRef) -> Segment:
        """Take over another process's segment under a name of this cache.

        Raises:
            MemoryNotShared: The segment cannot be opened on this host.
        """
        return self._segments.adopt(ref, persistent_name=name)

    def put(self, cached: CachedVersion) -> None:
        """Write or replace the record of a version. The version exists once its record is written."""
        manifest = manifest_to_json(cached.manifest, adapter_digest=cached.manifest.digest)
        record = record_to_json(cached.record, generation=cached.name)
        new = self._folder / f'{cached.name}{_NEW}'
        new.write_bytes(manifest + b'\n' + record)
        new.replace(self._folder / f'{cached.name}{_RECORD}')

    def remove(self, name: str) -> None:
        """Remove the record and then the segment with this name, if they exist."""
        self.remove_record(name)
        self._segments.remove_persistent(name)

    def remove_record(self, name: str) -> None:
        """Remove only the record of a version; readers that have the segment's name can still open the segment."""
        (self._folder / f'{name}{_RECORD}').unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the cache, and remove its folder if the folder contains no record."""
        if not any(self._folder.glob(f'*{_RECORD}')):
            shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def _read(self, path: Path) -> Iterator[CachedVersion]:
        try:
            manifest_line, _, record_lines = path.read_bytes().partition(b'\n')
            manifest = manifest_from_json(manifest_line, is_adapter_only=False)
            record, name = record_from_json(record_lines)
            segment = self._segments.open_persistent(name, manifest.size_bytes)
        except (ValueError, KeyError, TypeError, MemoryNotShared) as error:
            _log.error('unreadable record in shared memory removed', path=str(path), error=str(error))
            path.unlink()
            return
        yield CachedVersion(name, record, manifest, segment)

    def _sweep_others(self) -> None:
        for folder in self._segments.folder.glob(f'{_FOLDER}*'):
            owner = folder.name.removeprefix(_FOLDER)
            if owner != self._owner and not _has_home(folder):
                self._sweep(folder, owner)

    def _sweep(self, folder: Path, owner: str) -> None:
        lock = _lock(folder)
        if lock is None:
            return
        shutil.rmtree(folder, ignore_errors=True)
        for name in self._segments.persistent_names():
            if name.startswith(f'{owner}.'):
                self._segments.remove_persistent(name)
        os.close(lock)


def _has_home(folder: Path) -> bool:
    try:
        return Path((folder / _HOME).read_text()).exists()
    except FileNotFoundError:
        # Another process is creating or removing the folder.
        return True


def _lock(folder: Path) -> int | None:
    """Lock a folder and return the lock's descriptor; None if the folder is already locked or cannot be opened."""
    with suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock
    return None
