"""Checksums of stored files, so that a changed file is detected when it is read. Digests are blake3, hexadecimal.

Files and folders that an earlier release wrote without a checksum are accepted.
"""

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

_SUMS = 'b3sums'
"""File with the digests of the other files of its folder."""
_CHECKED = re.compile(rb'(.*)\n([0-9a-f]{64})\n', re.DOTALL)
_PREFIX = re.compile(rb'([0-9a-f]{64}) ([0-9]+)')
_PIECE_BYTES = 1 << 20


class FileDamaged(ValueError):
    """A file differs from what was written, or is missing."""


def with_checksum(content: bytes) -> bytes:
    """Return `content` followed by its checksum, in the format that `checked` expects."""
    return content + b'\n' + blake3(content).hexdigest().encode() + b'\n'


def checked(content: bytes) -> bytes:
    """Return the content without its checksum; content that has no checksum is returned unchanged.

    Raises:
        FileDamaged: The checksum does not match.
    """
    match = _CHECKED.fullmatch(content)
    if match is None:
        return content
    if blake3(match[1]).hexdigest().encode() != match[2]:
        raise FileDamaged('the checksum does not match')
    return match[1]


def write_sums(folder: Path) -> None:
    """Store the digests of the files in a folder; the caller syncs the folder."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != _SUMS)
    content = with_checksum(''.join(f'{digest_of(path)}  {path.name}\n' for path in paths).encode())
    with (folder / _SUMS).open('wb') as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def check_sums(folder: Path) -> None:
    """Compare the files of a folder with their stored digests, if any; files that were added later are not checked.

    Raises:
        FileDamaged: A file differs or is missing, or the stored digests are damaged.
    """
    try:
        lines = checked((folder / _SUMS).read_bytes()).decode(errors='replace').splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        digest, _, name = line.partition('  ')
        path = folder / Path(name).name
        if not path.is_file() or digest_of(path) != digest:
            raise FileDamaged(f'{name} differs from what was written, or is missing')


def digest_of(path: Path, size_bytes: int | None = None) -> str:
    """Return the digest of a file, or of its first `size_bytes` bytes."""
    hasher, remaining = blake3(), size_bytes
    with path.open('rb') as file:
        while piece := file.read(_PIECE_BYTES if remaining is None else min(remaining, _PIECE_BYTES)):
            hasher.update(piece)
            remaining = None if remaining is None else remaining - len(piece)
    return hasher.hexdigest()


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 digest of a file."""
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def write_prefix_sum(path: Path) -> None:
    """Store the current digest of a growing file in a file next to it. Errors of the file system are ignored."""
    with suppress(OSError):
        size_bytes = path.stat().st_size
        staging = path.with_name(f'{path.name}.b3.new')
        staging.write_bytes(with_checksum(f'{digest_of(path, size_bytes)} {size_bytes}'.encode()))
        staging.replace(path.with_name(f'{path.name}.b3'))


def is_prefix_intact(path: Path, *, is_content_read: bool = True) -> bool:
    """Return whether a file still begins with the bytes that the last call of `write_prefix_sum` covered.

    The result is True if the file is missing, or if its digest is missing or damaged.

    Args:
        path: The file.
        is_content_read: Whether to compare the bytes; otherwise only the size is compared.
    """
    if (prefix := _prefix_sum(path)) is None:
        return True
    digest, size_bytes = prefix
    with suppress(FileNotFoundError):
        return path.stat().st_size >= size_bytes and (not is_content_read or digest_of(path, size_bytes) == digest)
    return True


def covered_bytes(path: Path) -> int:
    """Return the number of bytes that `write_prefix_sum` last covered; 0 if the digest is missing or damaged."""
    prefix = _prefix_sum(path)
    return 0 if prefix is None else prefix[1]


def _prefix_sum(path: Path) -> tuple[str, int] | None:
    with suppress(FileNotFoundError, FileDamaged):
        match = _PREFIX.fullmatch(checked(path.with_name(f'{path.name}.b3').read_bytes()))
        return None if match is None else (match[1].decode(), int(match[2]))
    return None
