"""Segments: states in memory that the processes of one host share, as files of one folder.

The folder belongs to one user and to nobody else. Names carry their owner: `<owner>.<random>` is
removed with its `Segment`, or by the next process to open the folder once the owner has died, which
a lock on the file `owner-<owner>` tells across containers; `keep.<name>` outlives its process, and
who made it sweeps it. A segment that is open stays readable when its name is removed.
"""

import errno
import fcntl
import mmap
import os
import re
import stat
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict

from services.kit.errors import MemoryNotShared
from services.kit.weights.frames import SegmentRef

_log = structlog.get_logger('weights')

_SHARED_MEMORY = Path('/dev/shm')  # noqa: S108 (the kernel's own place for it; the folder inside is checked)
_NAME = re.compile(r'[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}')
_OWNED = re.compile(r'[0-9a-f]{16}[.][0-9a-f]{16}')
_HOST_ID = re.compile(r'[0-9a-f]{32}')
_OWNER_FILE = 'owner-'
_KEPT = 'keep.'
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_PARTS_AT_ONCE = 512
"""Of one call that writes; systems take at least so many."""


class SegmentsConfig(BaseModel):
    """Memory shared with the other services of this host."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    is_enabled: bool = True
    """Hand states over in shared memory where the other end sees the same; else they go as bytes."""
    folder: str = ''
    """Where segments lie; all services of a host have to be told the same. Empty: /dev/shm/twinkle-<uid>,
    where there is a /dev/shm."""


class Segment:
    """An open segment. While any view of `data` lives, its name does, unless it is a kept one."""

    def __init__(self, ref: SegmentRef, path: str, mapping: mmap.mmap, *, owner: 'Segments | None') -> None:
        """Hold what was opened; with an owner, the name is removed with the last view of the bytes."""
        self.ref = ref
        self.path = path
        self._mapping: mmap.mmap | None = mapping
        # The owner is kept alive with the segment: were its lock let go, others would sweep the segment.
        self._remove = None if owner is None else weakref.finalize(mapping, _remove, path, owner)

    @property
    def data(self) -> memoryview:
        """The bytes: writable only where this process created the segment."""
        if self._mapping is None:
            raise RuntimeError('the segment was let go of')
        return memoryview(self._mapping)

    def let_go(self) -> None:
        """Give up the bytes; views of them stay good. Unmapping many takes a while: call it in a thread."""
        self._mapping = None

    def remove(self) -> None:
        """Remove the name of a segment that is not kept; views of it stay good. Again is harmless."""
        if self._remove is not None:
            self._remove()


class Segments:
    """The folder of segments, as one process sees it.

    Concurrency: any thread.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder, made if need be, and remove what processes that died have left there.

        Raises:
            OSError: it cannot be made, or belongs to someone else.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        weakref.finalize(self, os.close, self._directory)
        facts = os.fstat(self._directory)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise PermissionError(f'{folder} has to belong to this user alone')
        self.host_id = self._read_host_id()
        """Tells whether two processes see the same memory: random, and written into the folder."""
        self._owner, self._lock = self._take_ownership()
        weakref.finalize(self, _let_go, self._lock, str(folder / f'{_OWNER_FILE}{self._owner}'))
        self.sweep()

    @property
    def folder(self) -> Path:
        """Where the segments lie."""
        return self._folder

    def create(self, size_bytes: int, *, kept_name: str = '') -> Segment:
        """Make a segment with writable bytes.

        Args:
            size_bytes: At least 1. The memory is taken now, so that writing cannot fail later.
            kept_name: Makes it outlive this process, under this name. Empty: it is removed with the last view.

        Raises:
            OSError: there is not so much memory, or the kept name is taken.
        """
        name = self._new_name(kept_name)
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._directory)
        try:
            os.posix_fallocate(file, 0, size_bytes)
            mapping = mmap.mmap(file, size_bytes)
        except BaseException:
            os.unlink(name, dir_fd=self._directory)
            raise
        finally:
            os.close(file)
        return self._segment(name, size_bytes, mapping)

    def write(self, parts: Sequence[bytes | memoryview]) -> Segment:
        """Make a segment that holds `parts`, one after the other, read-only and removed with its last view.

        Memory that is written by the system need not be cleared and mapped page by page first: for
        fresh memory that is most of the work.

        Raises:
            OSError: there is not so much memory.
        """
        name = self._new_name('')
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._directory)
        try:
            size_bytes = _write(file, parts)
            mapping = mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except BaseException:
            os.unlink(name, dir_fd=self._directory)
            raise
        finally:
            os.close(file)
        return self._segment(name, size_bytes, mapping)

    def adopt(self, ref: SegmentRef, *, kept_name: str = '') -> Segment:
        """Give another process's segment a name of our own and open it, read-only.

        The other one may remove its name at any time afterwards. Its bytes are as trustworthy as it is:
        check their digest.

        Raises:
            MemoryNotShared: it is not in this memory, or is not what was announced.
            OSError: the kept name is taken.
        """
        if ref.host_id != self.host_id or not _NAME.fullmatch(ref.name) or ref.size_bytes < 1:
            raise MemoryNotShared()
        name = self._new_name(kept_name)
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

    def open_kept(self, kept_name: str, size_bytes: int) -> Segment:
        """Open a kept segment of our own, read-only.

        Raises:
            MemoryNotShared: there is none of that name and size.
        """
        return self._open(self._new_name(kept_name), size_bytes)

    def kept_names(self) -> list[str]:
        """Return the names of all kept segments, of whichever process."""
        names = [entry.name for entry in self._folder.iterdir() if entry.name.startswith(_KEPT)]
        return sorted(name.removeprefix(_KEPT) for name in names)

    def remove_kept(self, kept_name: str) -> None:
        """Remove the name of a kept segment; nothing happens where there is none."""
        with suppress(FileNotFoundError):
            os.unlink(self._new_name(kept_name), dir_fd=self._directory)

    def sweep(self) -> None:
        """Remove the segments of processes that have died."""
        entries = [entry.name for entry in self._folder.iterdir()]
        owners = {entry.partition('.')[0] for entry in entries if _OWNED.fullmatch(entry)}
        owners |= {entry.removeprefix(_OWNER_FILE) for entry in entries if entry.startswith(_OWNER_FILE)}
        dead = {owner for owner in owners - {self._owner} if self._is_dead(f'{_OWNER_FILE}{owner}')}
        for entry in entries:
            if _OWNED.fullmatch(entry) and entry.partition('.')[0] in dead:
                with suppress(FileNotFoundError):
                    os.unlink(entry, dir_fd=self._directory)

    def _segment(self, name: str, size_bytes: int, mapping: mmap.mmap) -> Segment:
        ref = SegmentRef(self.host_id, name, size_bytes)
        owner = None if name.startswith(_KEPT) else self
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
            mapping = mmap.mmap(file, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        return self._segment(name, size_bytes, mapping)

    def _new_name(self, kept_name: str) -> str:
        if not kept_name:
            return f'{self._owner}.{os.urandom(8).hex()}'
        if not _NAME.fullmatch(kept_name) or len(kept_name) > 150:
            raise ValueError(f'{kept_name!r} is no name for a segment')
        return _KEPT + kept_name

    def _read_host_id(self) -> str:
        """Return the folder's id, written now if this process is the first."""
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
            raise OSError(f'{self._folder / "host"} is damaged; remove it while no service runs')
        return host_id

    def _take_ownership(self) -> tuple[str, int]:
        """Return a new owner and the descriptor whose lock says that it lives."""
        while True:
            owner = os.urandom(8).hex()
            name = f'{_OWNER_FILE}{owner}'
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._directory)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return owner, file
            os.close(file)  # a sweep saw the file before its lock

    def _is_dead(self, owner_file: str) -> bool:
        """Say whether the owner has died, and remove its file if so."""
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
    """Open the folder of the configuration; None where memory is not to be, or cannot be, shared.

    Args:
        config: What was configured.
        memory: The memory file system that the folder lies in where none was named.

    Raises:
        OSError: a folder that was named cannot be used.
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
            'weights go as bytes, memory is not shared',
            folder=str(folder),
            problem=str(error),
            cure="make the folder this user's alone (chmod 700), or name another one in `shared_memory.folder`",
        )
        return None


def _write(file: int, parts: Sequence[bytes | memoryview]) -> int:
    """Write parts one after the other, however much the system takes at once; return how many bytes there are.

    Raises:
        OSError: there is no room for them.
    """
    views = [memoryview(part) for part in parts if len(part)]
    size_bytes = 0
    begin = 0
    while begin < len(views):
        taken = os.pwritev(file, views[begin : begin + _PARTS_AT_ONCE], size_bytes)
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


def _let_go(lock: int, owner_file: str) -> None:
    _unlink(owner_file)
    os.close(lock)
