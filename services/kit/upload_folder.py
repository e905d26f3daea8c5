"""The folder of one upload: a header, and a file with the received bytes. The file's size is the committed offset."""

import hashlib
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from twinkle.checkpoint_engine import chunk_checksum
from twinkle_services.kit.checksums import checked, covered_bytes, digest_of, is_prefix_intact, sha256_of, with_checksum
from twinkle_services.kit.errors import ChunkCorrupt, DigestMismatch, StoredDataDamaged

BYTES_FILE = 'bytes'
_HEADER_FILE = 'header.json'
_VERIFIED_FILE = 'verified.json'
"""Copy of the header with which the complete file was verified."""


@dataclass(frozen=True, kw_only=True)
class UploadHeader:
    """The first message of an upload's stream."""

    upload_id: str
    """Chosen by the caller; unique within a tenant."""
    size_bytes: int
    """Size of the complete file."""
    digest: str = ''
    """blake3 digest of the complete file, hexadecimal; empty if the client sends none."""
    sha256: str = ''
    """SHA-256 digest of the complete file, hexadecimal; empty if the client sends none."""

    @property
    def has_digest(self) -> bool:
        """Whether the client sends a digest of the complete file."""
        return bool(self.digest or self.sha256)

    def check_digests(self, path: Path) -> None:
        """Compare a complete file with the digests that the client sent.

        Raises:
            DigestMismatch: A digest differs.
        """
        for field, expected, compute in (('digest', self.digest, digest_of), ('sha256', self.sha256, sha256_of)):
            if expected and (actual := compute(path)) != expected:
                raise DigestMismatch(expected=expected, actual=actual, field=f'header.{field}')


_HEADERS = TypeAdapter(UploadHeader)


@dataclass(frozen=True, kw_only=True)
class UploadChunk:
    """Bytes of an upload, with the checksums that the client sent."""

    offset: int
    """Offset of the first byte in the file."""
    data: bytes | memoryview
    checksum: int | None = None
    """xxh3-64 of `data` as a signed integer; None if the client sends none."""
    sha256: bytes = b''
    """SHA-256 digest of `data`; empty if the client sends none."""

    def check(self) -> None:
        """Compare the bytes with the checksums.

        Raises:
            ChunkCorrupt: A checksum differs.
        """
        if self.checksum is not None and chunk_checksum(self.data) != self.checksum:
            raise ChunkCorrupt(self.offset)
        if self.sha256 and hashlib.sha256(self.data).digest() != self.sha256:
            raise ChunkCorrupt(self.offset, field='chunk.sha256')


@dataclass(frozen=True, kw_only=True)
class UploadStatus:
    """The state of an upload."""

    header: UploadHeader
    committed_bytes: int
    """Number of stored bytes; a client continues at this offset."""
    path: Path
    """File with the stored bytes."""

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are stored."""
        return self.committed_bytes == self.header.size_bytes


def _header_in(path: Path) -> UploadHeader | None:
    """Return the header in a file; None if it is missing or damaged."""
    with suppress(FileNotFoundError, ValueError):
        return _HEADERS.validate_json(checked(path.read_bytes()))
    return None


def is_marked_verified(folder: Path, header: UploadHeader) -> bool:
    """Return whether `mark_verified` was called with this header, and a stored checksum covers the complete upload."""
    return covered_bytes(folder / BYTES_FILE) == header.size_bytes and _header_in(folder / _VERIFIED_FILE) == header


def mark_verified(folder: Path, header: UploadHeader) -> None:
    """Record that a complete upload has the digests of `header`. Errors of the file system are ignored."""
    with suppress(OSError):
        _write_header(folder / _VERIFIED_FILE, header)


def intact_status(folder: Path, upload_id: str, *, is_content_read: bool = False) -> UploadStatus | None:
    """Return the state of the upload in a folder; None if there is no upload.

    Raises:
        StoredDataDamaged: The header is damaged, bytes are missing, or, with `is_content_read`, bytes have changed.
    """
    if (status := status_in(folder)) is None and not (folder / _HEADER_FILE).exists():
        return None
    if status is None or not is_prefix_intact(status.path, is_content_read=is_content_read):
        raise StoredDataDamaged('upload', upload_id)
    if is_content_read and status.is_complete:
        try:
            status.header.check_digests(status.path)
        except DigestMismatch as error:
            raise StoredDataDamaged('upload', upload_id) from error
    return status


def status_in(folder: Path) -> UploadStatus | None:
    """Return the state of the upload in a folder without checking its bytes.

    Without an intact header or without the file of the bytes, return None.
    """
    header, path = _header_in(folder / _HEADER_FILE), folder / BYTES_FILE
    if header is not None:
        with suppress(FileNotFoundError):
            return UploadStatus(header=header, committed_bytes=path.stat().st_size, path=path)
    return None


def create_folder(folder: Path, header: UploadHeader) -> None:
    """Create an upload without bytes. If the disk fails, nothing remains."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _VERIFIED_FILE).unlink(missing_ok=True)  # a removal that failed may have left it
        (folder / BYTES_FILE).write_bytes(b'')
        # The header is written last and atomically: without it the upload does not exist.
        write_header(folder, header)
    except OSError:
        remove_folder(folder)
        raise


def write_header(folder: Path, header: UploadHeader) -> None:
    """Replace the header of an upload atomically."""
    _write_header(folder / _HEADER_FILE, header)


def _write_header(path: Path, header: UploadHeader) -> None:
    staging = path.with_name(f'{path.name}.new')
    staging.write_bytes(with_checksum(_HEADERS.dump_json(header)))
    staging.replace(path)


def holds(path: Path, chunk: UploadChunk) -> bool:
    """Return whether a file has the bytes of `chunk`, as far as the file extends."""
    with path.open('rb') as file:
        file.seek(chunk.offset)
        stored = file.read(len(chunk.data))
    return stored == chunk.data[: len(stored)]


def append(path: Path, data: memoryview) -> None:
    """Append `data` to a file. If the disk fails, the file is unchanged."""
    size_bytes = path.stat().st_size
    try:
        with path.open('ab') as file:
            file.write(data)
    except OSError:
        # A full disk may store a part of the data, which would change the offset of the next chunk.
        with suppress(OSError):
            os.truncate(path, size_bytes)
        raise


def modified(path: Path) -> float:
    """Return the time of the last change in seconds since the epoch; 0 if the file does not exist."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def remove_leftover(path: Path) -> None:
    """Remove a file or an empty folder of an earlier layout. A folder with content remains."""
    with suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()


def remove_folder(folder: Path) -> None:
    """Remove an upload, and the tenant's folder if it is then empty. Errors of the disk are ignored.

    The header is removed first, because without a header the upload does not exist.
    """
    with suppress(OSError):
        (folder / _HEADER_FILE).unlink()
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()  # if the tenant has no other upload
