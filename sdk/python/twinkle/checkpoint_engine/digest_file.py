"""File with the blake3 digests of all other files of a folder, in the format of the command `b3sum --check`."""

import os
from pathlib import Path

from blake3 import blake3

from twinkle.checkpoint_engine.errors import InvalidModelFolder

DIGESTS_FILE = 'b3sums'
"""Name of the file with the digests."""


def write_digests(folder: Path) -> None:
    """Sync all files of a folder to the disk, and write their digests.

    Raises:
        OSError: reading or writing failed.
    """
    files = sorted(path for path in folder.rglob('*') if path.is_file() and path.name != DIGESTS_FILE)
    lines = [f'{_digest_of(path)}  {path.relative_to(folder).as_posix()}\n' for path in files]
    target = folder / DIGESTS_FILE
    target.write_text(''.join(lines))
    for path in (*files, target):
        _sync(path)


def check_digests(folder: Path) -> None:
    """Check every file that has a digest in the folder's `b3sums`; other files are not read.

    Raises:
        InvalidModelFolder: the digests are missing, or a file is missing or damaged.
    """
    try:
        lines = (folder / DIGESTS_FILE).read_text().splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        raise InvalidModelFolder(DIGESTS_FILE, 'is missing or malformed, so the folder may be incomplete') from None
    for line in lines:
        digest, _, name = line.partition('  ')
        try:
            is_intact = _digest_of(folder / name) == digest
        except (FileNotFoundError, IsADirectoryError):
            raise InvalidModelFolder(name, 'is missing') from None
        if not is_intact:
            raise InvalidModelFolder(name, f'does not have the digest in {DIGESTS_FILE}, so it is damaged')


def _digest_of(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
