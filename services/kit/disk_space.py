"""Check of a disk's free space before data is written, so that a full disk does not interrupt a request halfway."""

import shutil
from pathlib import Path

from twinkle_services.kit.errors import DiskFull

RESERVE_BYTES = 64 << 20
"""Space that stays free for journals, databases and logs, which share the disk with uploads and states."""


def check_free_space(folder: Path, size_bytes: int) -> None:
    """Check that the disk of a folder has enough space for new data. The folder need not exist yet.

    Raises:
        DiskFull: The disk would have less than `RESERVE_BYTES` of free space afterwards.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes = max(shutil.disk_usage(existing).free - RESERVE_BYTES, 0)
    if size_bytes > free_bytes:
        raise DiskFull(free_bytes=free_bytes, needed_bytes=size_bytes)
