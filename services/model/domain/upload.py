"""A batch on its way in pieces: what announces it, its pieces, where it stands, and what keeps it."""

from dataclasses import dataclass
from typing import Protocol


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


class Upload(Protocol):
    """A batch on its way in pieces; held by one stream at a time."""

    @property
    def committed_bytes(self) -> int:
        """Bytes kept, from the beginning."""
        ...

    async def add(self, data: bytes) -> None:
        """Keep the next bytes."""
        ...

    async def verify(self) -> None:
        """Check the whole against the header's digest, once all of it is there.

        Raises:
            DigestMismatch: it is something else; nothing was kept.
        """
        ...

    async def close(self) -> None:
        """Let another stream go on with it."""
        ...


class UploadStore(Protocol):
    """Keeps uploads of batches for a while; ids are the tenant's own."""

    async def open(self, tenant_id: str, header: UploadHeader) -> Upload:
        """Return an upload to add to, new or begun.

        Raises:
            InUse: another stream holds it.
            InvalidField: the header says otherwise than when the upload began.
            QuotaExceeded: the tenant has too much lying here.
        """
        ...

    async def read(self, tenant_id: str, upload_id: str) -> bytes | None:
        """Return the bytes of a finished upload; None where the tenant has none, or it expired."""
        ...
