"""Versions in shared memory, each a segment with its record beside it: what a killed process leaves to the next one.

Segments are files of the host's folder of segments; the records lie in a folder of their own in there,
one for each store. A segment exists as a version once its record does. `home` in the folder of records
says where the store lives: when that is gone, nobody will ask for its versions, and any other service
sweeps them.
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

from services.checkpoint.backends.record_json import (
    manifest_from_json,
    manifest_to_json,
    record_from_json,
    record_to_json,
)
from services.checkpoint.domain import Record
from services.kit.errors import InUse, MemoryNotShared
from services.kit.ids import new_id
from services.kit.weights import Segment, SegmentRef, Segments
from twinkle.checkpoint_engine import WeightManifest

_log = structlog.get_logger('memory')

_FOLDER = 'checkpoint.'
_HOME = 'home'
_LOCK = 'lock'
_RECORD = '.record'
"""Its first line is the manifest, the rest the record, both as JSON."""
_NEW = '.new'


@dataclass(frozen=True)
class Shelved:
    """A version on the shelf."""

    name: str
    record: Record
    manifest: WeightManifest
    segment: Segment


class SegmentShelf:
    """The segments and records of one store. Concurrency: any thread; one process at a time."""

    def __init__(self, segments: Segments, *, store_url: str, home: Path) -> None:
        """Take the shelf of a store, and sweep those whose store is gone.

        Args:
            segments: The host's folder of segments.
            store_url: Tells one store from another.
            home: A folder that is there as long as the store is.

        Raises:
            InUse: another process has it.
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
        """The host's folder of segments."""
        return self._segments

    def load(self) -> list[Shelved]:
        """Remove what has no record, and return the rest."""
        found = [shelved for path in sorted(self._folder.glob(f'*{_RECORD}')) for shelved in self._read(path)]
        kept = {shelved.name for shelved in found}
        for name in self._segments.kept_names():
            if name.startswith(f'{self._owner}.') and name not in kept:
                self._segments.remove_kept(name)
        for path in self._folder.glob(f'*{_NEW}'):
            path.unlink()
        return found

    def new_name(self) -> str:
        """Return a name for a segment of this shelf."""
        return f'{self._owner}.{new_id("seg")}'

    def create(self, name: str, size_bytes: int) -> Segment:
        """Return a new segment with writable bytes.

        Raises:
            OSError: there is not so much memory.
        """
        return self._segments.create(size_bytes, kept_name=name)

    def adopt(self, name: str, ref: SegmentRef) -> Segment:
        """Return another process's segment under a name of this shelf.

        Raises:
            MemoryNotShared: it cannot be opened here.
        """
        return self._segments.adopt(ref, kept_name=name)

    def put(self, shelved: Shelved) -> None:
        """Write a version's record, in place of the one before it: from now on the version is here."""
        manifest = manifest_to_json(shelved.manifest, adapter_digest=shelved.manifest.digest)
        record = record_to_json(shelved.record, generation=shelved.name)
        new = self._folder / f'{shelved.name}{_NEW}'
        new.write_bytes(manifest + b'\n' + record)
        new.replace(self._folder / f'{shelved.name}{_RECORD}')

    def remove(self, name: str) -> None:
        """Remove a version, its record first, or a segment that never had one; again is harmless."""
        self.remove_record(name)
        self._segments.remove_kept(name)

    def remove_record(self, name: str) -> None:
        """Remove a version's record; whoever is being told its segment's name still finds it."""
        (self._folder / f'{name}{_RECORD}').unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process take the shelf; one that is empty goes."""
        if not any(self._folder.glob(f'*{_RECORD}')):
            shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def _read(self, path: Path) -> Iterator[Shelved]:
        try:
            manifest_line, _, record_lines = path.read_bytes().partition(b'\n')
            manifest = manifest_from_json(manifest_line, is_adapter_only=False)
            record, name = record_from_json(record_lines)
            segment = self._segments.open_kept(name, manifest.size_bytes)
        except (ValueError, KeyError, TypeError, MemoryNotShared) as error:
            _log.error('unreadable record in memory', path=str(path), error=str(error))
            path.unlink()
            return
        yield Shelved(name, record, manifest, segment)

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
        for name in self._segments.kept_names():
            if name.startswith(f'{owner}.'):
                self._segments.remove_kept(name)
        os.close(lock)


def _has_home(folder: Path) -> bool:
    try:
        return Path((folder / _HOME).read_text()).exists()
    except FileNotFoundError:
        # Being made just now, or being swept.
        return True


def _lock(folder: Path) -> int | None:
    """Return the descriptor that locks a folder; None where another process has it."""
    with suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock
    return None
