"""Shared-memory segments: states in memory that the processes of one host share, as files of one folder.

Only one user may write to the folder. A temporary segment is named `<owner>.<random>`. Its name is removed with the
last view of its bytes, or, if the owning process has died, by the next process that opens the folder. A lock on the
file `owner-<owner>` shows across containers whether the owner is alive. A persistent segment is named `keep.<name>`. It
remains after its process ends, until a service removes it. An open segment stays readable after its name was removed.
"""

import errno
import fcntl
import os
import re
import stat
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict

from twinkle_services.kit.errors import MemoryNotShared
from twinkle_services.kit.weights.frames import SegmentRef
from twinkle_services.kit.weights.mapping import Mapping

_log = structlog.get_logger('weights')

_SHARED_MEMORY = Path('/dev/shm')  # noqa: S108 (the kernel's shared memory; the folder inside is checked)
_NAME = re.compile(r'[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}')
_OWNED = re.compile(r'[0-9a-f]{16}[.][0-9a-f]{16}')
_HOST_ID = re.compile(r'[0-9a-f]{32}')
_OWNER_FILE = 'owner-'
_PERSISTENT_PREFIX = 'keep.'
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_PARTS_PER_WRITE = 512
"""Maximum number of buffers per write call; Linux supports up to 1024."""


class SegmentsConfig(BaseModel):
    """Settings of the memory that the services of a host share."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    is_enabled: bool = True
    """Whether to pass states in shared memory to services on the same host; otherwise gRPC sends the bytes."""
    folder: str = ''
    """Folder of the segments, equal for all services of a host. Empty: /dev/shm/twinkle-<uid>, if /dev/shm exists."""


class Segment:
    """An open segment. The name of a temporary segment exists until `remove`, or until the last view of `data` ends."""

    def __init__(self, ref: SegmentRef, path: str, mapping: Mapping, *, owner: 'Segments | None') -> None:
        """Wrap an opened segment; with an owner, the name is removed together with the last view of the bytes."""
        self.ref = ref
        self.path = path
        self._mapping: Mapping | None = mapping
        # The segment references the owner, because other processes remove segments whose owner's lock is released.
        self._remove = None if owner is None else weakref.finalize(mapping.area, _remove, path, owner)

    @property
    def data(self) -> memoryview:
        """Bytes of the segment; writable only if `Segments.create` returned the segment.

        Raises:
            RuntimeError: `release` was called.
        """
        if self._mapping is None:
            raise RuntimeError('the segment was released')
        return self._mapping.data

    def release(self) -> None:
        """Release the bytes; existing views stay valid. Unmapping large segments is slow, so call it in a thread."""
        self._mapping = None

    def remove(self) -> None:
        """Remove the name of a temporary segment; existing views stay valid. Idempotent."""
        if self._remove is not None:
            self._remove()


class Segments:
    """The folder of segments, opened by one process.

    Concurrency: safe to use from any thread.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder, creating it if necessary, and remove the temporary segments of dead processes.

        Raises:
            OSError: The folder cannot be created, another user may write to it, or its file `host` is damaged.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        weakref.finalize(self, os.close, self._directory)
        facts = os.fstat(self._directory)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise PermissionError(f'{folder} must belong to this user and be writable by this user only')
        self.host_id = self._read_host_id()
        """Random id stored in the folder; equal for all processes that share the memory."""
        self._owner, self._lock = self._take_ownership()
        weakref.finalize(self, _release_owner, self._lock, str(folder / f'{_OWNER_FILE}{self._owner}'))
        self.sweep()

    @property
    def folder(self) -> Path:
        """Folder of the segments."""
        return self._folder

    def create(self, size_bytes: int, *, persistent_name: str = '') -> Segment:
        """Create a segment with writable bytes.

        Args:
            size_bytes: Size, at least 1. The memory is allocated now, so that writing cannot fail later.
            persistent_name: Name of a persistent segment, which outlives this process. Empty for a temporary segment.

        Raises:
            OSError: There is not enough memory, or the persistent name is in use.
            ValueError: The persistent name is invalid.
        """
        name = self._new_name(persistent_name)
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._directory)
        try:
            os.posix_fallocate(file, 0, size_bytes)
            mapping = Mapping(file, size_bytes, is_writable=True)
        except BaseException:
            os.unlink(name, dir_fd=self._directory)
            raise
        finally:
            os.close(file)
        return self._segment(name, size_bytes, mapping)

    def write(self, parts: Sequence[bytes | memoryview]) -> Segment:
        """Create a temporary, read-only segment with the concatenated `parts`.

        Writing through the file system avoids clearing and mapping each page first, which takes most of the time for
        new memory.

        Raises:
            OSError: There is not enough memory.
        """
        name = self._new_name('')
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._directory)
        try:
            size_bytes = _write(file, parts)
            mapping = Mapping(file, size_bytes, is_writable=False)
        except BaseException:
            os.unlink(name, dir_fd=self._directory)
            raise
        finally:
            os.close(file)
        return self._segment(name, size_bytes, mapping)

    def adopt(self, ref: SegmentRef, *, persistent_name: str = '') -> Segment:
        """Open another process's segment read-only, after linking it under a new name.

        The other process may then remove the original name at any time. The bytes are untrusted: check their digest.

        Raises:
            MemoryNotShared: The segment is not in this memory, or does not have the announced size.
            OSError: The persistent name is in use, or the segment cannot be mapped.
            ValueError: The persistent name is invalid.
        """
        if ref.host_id != self.host_id or not _NAME.fullmatch(ref.name) or ref.size_bytes < 1:
            raise MemoryNotShared()
        name = self._new_name(persistent_name)
        try:
            os.link(ref.name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError as error:
            raise MemoryNotShared() from error
        try:
            return self._open(name, ref.size_bytes)
        except BaseException:
            os.unlink(name, dir_fd=self._directory)
            raise

    def open_persistent(self, persistent_name: str, size_bytes: int) -> Segment:
        """Open a persistent segment read-only.

        Raises:
            MemoryNotShared: No persistent segment has that name and size.
            OSError: The segment cannot be mapped.
            ValueError: The name is invalid.
        """
        return self._open(self._new_name(persistent_name), size_bytes)

    def persistent_names(self) -> list[str]:
        """Return the names of all persistent segments, of all processes."""
        names = [entry.name for entry in self._folder.iterdir() if entry.name.startswith(_PERSISTENT_PREFIX)]
        return sorted(name.removeprefix(_PERSISTENT_PREFIX) for name in names)

    def remove_persistent(self, persistent_name: str) -> None:
        """Remove the name of a persistent segment, if the segment exists.

        Raises:
            ValueError: The name is invalid.
        """
        with suppress(FileNotFoundError):
            os.unlink(self._new_name(persistent_name), dir_fd=self._directory)

    def sweep(self) -> None:
        """Remove the temporary segments of dead processes."""
        entries = [entry.name for entry in self._folder.iterdir()]
        owners = {entry.partition('.')[0] for entry in entries if _OWNED.fullmatch(entry)}
        owners |= {entry.removeprefix(_OWNER_FILE) for entry in entries if entry.startswith(_OWNER_FILE)}
        dead = {owner for owner in owners - {self._owner} if self._is_dead(f'{_OWNER_FILE}{owner}')}
        for entry in entries:
            if _OWNED.fullmatch(entry) and entry.partition('.')[0] in dead:
                with suppress(FileNotFoundError):
                    os.unlink(entry, dir_fd=self._directory)

    def _segment(self, name: str, size_bytes: int, mapping: Mapping) -> Segment:
        ref = SegmentRef(self.host_id, name, size_bytes)
        owner = None if name.startswith(_PERSISTENT_PREFIX) else self
        return Segment(ref, str(self._folder / name), mapping, owner=owner)

    def _open(self, name: str, size_bytes: int) -> Segment:
        try:
            file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._directory)
        except OSError as error:
            raise MemoryNotShared() from error
        try:
            facts = os.fstat(file)
            is_ours = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
            if not is_ours or facts.st_size != size_bytes:
                raise MemoryNotShared()
            mapping = Mapping(file, size_bytes, is_writable=False)
        finally:
            os.close(file)
        return self._segment(name, size_bytes, mapping)

    def _new_name(self, persistent_name: str) -> str:
        if not persistent_name:
            return f'{self._owner}.{os.urandom(8).hex()}'
        if not _NAME.fullmatch(persistent_name) or len(persistent_name) > 150:
            problem = f'{persistent_name!r} is not a segment name'
            raise ValueError(f'{problem}; use at most 150 letters, digits, ".", "_" and "-"')
        return _PERSISTENT_PREFIX + persistent_name

    def _read_host_id(self) -> str:
        """Return the folder's id, after writing a new one if the folder has none."""
        mine = f'new-{os.urandom(8).hex()}'
        file = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._directory)
        try:
            os.write(file, os.urandom(16).hex().encode())
            with suppress(FileExistsError):
                os.link(mine, 'host', src_dir_fd=self._directory, dst_dir_fd=self._directory)
        finally:
            os.close(file)
            os.unlink(mine, dir_fd=self._directory)
        file = os.open('host', os.O_RDONLY | _OPEN, dir_fd=self._directory)
        try:
            host_id = os.read(file, 64).decode('ascii', 'replace')
        finally:
            os.close(file)
        if not _HOST_ID.fullmatch(host_id):
            raise OSError(f'{self._folder / "host"} is damaged; stop all services and remove it')
        return host_id

    def _take_ownership(self) -> tuple[str, int]:
        """Return a new owner id and the descriptor of its locked file."""
        while True:
            owner = os.urandom(8).hex()
            name = f'{_OWNER_FILE}{owner}'
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._directory)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return owner, file
            os.close(file)  # another process removed the file before it was locked

    def _is_dead(self, owner_file: str) -> bool:
        """Return whether the owner has died, and remove its file in that case."""
        try:
            file = os.open(owner_file, os.O_RDWR | _OPEN, dir_fd=self._directory)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                os.unlink(owner_file, dir_fd=self._directory)
        except BlockingIOError:
            return False
        finally:
            os.close(file)
        return True


def open_segments(config: SegmentsConfig, *, memory: Path = _SHARED_MEMORY) -> Segments | None:
    """Open the configured folder; return None if sharing memory is disabled or impossible.

    Args:
        config: Settings.
        memory: Memory file system for the default folder.

    Raises:
        OSError: A configured folder cannot be used.
    """
    if not config.is_enabled:
        return None
    if config.folder:
        return Segments(Path(config.folder))
    if not memory.is_dir():
        return None
    folder = memory / f'twinkle-{os.geteuid()}'
    try:
        return Segments(folder)
    except OSError as error:
        _log.warning(
            'shared memory not usable; sending bytes',
            folder=str(folder),
            problem=str(error),
            advice='run chmod 700 on the folder, or set another one in `shared_memory.folder`',
        )
        return None


def _write(file: int, parts: Sequence[bytes | memoryview]) -> int:
    """Write all parts in order, and return their total size in bytes.

    Raises:
        OSError: There is not enough memory.
    """
    views = [memoryview(part) for part in parts if len(part)]
    size_bytes = 0
    begin = 0
    while begin < len(views):
        taken = os.pwritev(file, views[begin : begin + _PARTS_PER_WRITE], size_bytes)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size_bytes += taken
        while begin < len(views) and taken >= len(views[begin]):
            taken -= len(views[begin])
            begin += 1
        if taken:
            views[begin] = views[begin][taken:]
    return size_bytes


def _remove(path: str, owner: Segments) -> None:
    del owner
    _unlink(path)


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _release_owner(lock: int, owner_file: str) -> None:
    _unlink(owner_file)
    os.close(lock)
