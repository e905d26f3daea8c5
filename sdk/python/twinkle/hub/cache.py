"""The cache of folders that are made once: where it is, and how a folder gets into it whole.

A folder is built under a temporary name and renamed when complete, under a lock between
processes, so whoever finds it may use it without looking inside.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder named by `TWINKLE_CACHE_DIR`, else `~/.cache/twinkle`."""
    named = os.environ.get('TWINKLE_CACHE_DIR')
    return Path(named).expanduser() if named else Path.home() / '.cache' / 'twinkle'


@contextmanager
def locked(name: str) -> Generator[None]:
    """Hold the cache's lock `name`; other processes that ask for it wait."""
    folder = cache_dir() / 'locks'
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f'{name}.lock').open('w') as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, having let `build` fill it if nobody has yet.

    Args:
        target: a folder in the cache.
        build: fills the empty folder it is given; what it raises leaves no `target` behind.

    Concurrency: of several processes one builds and the others wait for it.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.name):
        if target.is_dir():
            return target
        prefix = f'.{target.name}-'
        # Nobody else builds while we hold the lock: what is here was left by a process that died.
        for left_over in target.parent.glob(f'{prefix}*'):
            shutil.rmtree(left_over, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            build(staging)
            _make_readable(staging)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _make_readable(folder: Path) -> None:
    """Temporary folders and some writers' files are private; a cache may be shared between users."""
    folder.chmod(0o755)
    for path in folder.rglob('*'):
        path.chmod(0o755 if path.is_dir() else 0o644)
