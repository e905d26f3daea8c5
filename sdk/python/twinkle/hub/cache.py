"""The cache of folders that are built once.

A folder is built under a temporary name and renamed when it is complete, while a lock excludes other processes.
Therefore a folder in the cache is always complete.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: `TWINKLE_CACHE_DIR`, or `~/.cache/twinkle` if it is unset."""
    named = os.environ.get('TWINKLE_CACHE_DIR')
    return Path(named).expanduser() if named else Path.home() / '.cache' / 'twinkle'


@contextmanager
def locked(name: str) -> Generator[None]:
    """Hold the lock `name` of the cache; other processes that acquire it wait."""
    folder = cache_dir() / 'locks'
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f'{name}.lock').open('w') as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, and build it first if it does not exist.

    Args:
        target: a folder in the cache.
        build: function that fills the empty folder that it receives. If it raises an error, `target` is not created.

    Concurrency: if several processes need the folder, one process builds the folder and the other processes wait.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.name):
        if target.is_dir():
            return target
        prefix = f'.{target.name}-'
        # No other process builds while this process holds the lock, so existing folders are from failed builds.
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
    """Make all files readable for other users, because temporary files are private and caches may be shared."""
    folder.chmod(0o755)
    for path in folder.rglob('*'):
        path.chmod(0o755 if path.is_dir() else 0o644)
