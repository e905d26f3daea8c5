"""A batch on its way in pieces: what announces it, its pieces, and where it stands."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UploadHeader:
    """Announces an upload."""

    upload_id: str
    """Chosen by the caller; tenants cannot meet."""
    size_bytes: int
    """Of the whole, at least 1."""
    digest: str
    """blake3 of the whole, hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class UploadChunk:
    """The next bytes; their checksum has been checked."""

    offset: int
    data: bytes


@dataclass(frozen=True, kw_only=True)
class UploadStatus:
    """Where an upload stands."""

    upload_id: str
    committed_bytes: int
