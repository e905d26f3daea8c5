"""Uploads on the local disk: for each the bytes so far, and beside them what was announced.

They need not outlive a loss of power: an operation takes a copy of what it uses into the journal, and a
client whose upload is gone sends it again. Whatever is read is checked against its digest.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2s
from pathlib import Path

from blake3 import blake3
from pydantic import TypeAdapter

from services.kit.clock import Clock
from services.kit.errors import DigestMismatch, InUse, InvalidField, QuotaExceeded
from services.model.domain.upload import UploadHeader

_RECORD, _BYTES = 'header.json', 'bytes'
_HEADER = TypeAdapter(UploadHeader)
_MOST_UPLOADS = 256


@dataclass(frozen=True, kw_only=True)
class UploadLimits:
    """What one tenant may leave here."""

    tenant_bytes: int
    """Of all its uploads, as announced."""
    time_to_live: timedelta
    """Since bytes last came or were read."""


class UploadFiles:
    """Keeps one folder for each upload; implements `UploadStore`."""

    def __init__(self, root: Path, *, clock: Clock, limits: UploadLimits) -> None:
        """Keep them below `root`, as it was left; it is made when the first one comes."""
        self._root, self._clock, self._limits = root, clock, limits
        self._open: set[Path] = set()
        self._lock = threading.Lock()
        """Held while uploads are counted, begun or swept, so that two at once cannot pass one quota."""

    async def open(self, tenant_id: str, header: UploadHeader) -> 'UploadFile':
        """Return an upload to add to; see the port."""
        folder = self._folder(tenant_id, header.upload_id)
        if folder in self._open:
            raise InUse('upload', header.upload_id, 'another stream')
        self._open.add(folder)
        try:
            committed = await asyncio.to_thread(self._find_or_begin, folder, header)
        except BaseException:
            self._open.discard(folder)
            raise
        return UploadFile(self, folder, header, committed)

    async def read(self, tenant_id: str, upload_id: str) -> bytes | None:
        """Return the bytes of a finished upload; see the port."""
        return await asyncio.to_thread(self._read, self._folder(tenant_id, upload_id))

    def touch(self, folder: Path) -> None:
        """Begin an upload's time to live anew."""
        now = self._clock.now().timestamp()
        os.utime(folder / _BYTES, (now, now))

    def release(self, folder: Path) -> None:
        """Let another stream add to an upload."""
        self._open.discard(folder)

    def _find_or_begin(self, folder: Path, header: UploadHeader) -> int:
        with self._lock:
            self._discard_expired()
            known = _header_in(folder)
            if known is None:
                self._check_quota(folder.parent, header)
                _begin(folder, header)
                known = header
        if known != header:
            other = 'digest' if known.size_bytes == header.size_bytes else 'size_bytes'
            raise InvalidField(f'header.{other}', f'was {getattr(known, other)} when the upload began')
        self.touch(folder)
        return (folder / _BYTES).stat().st_size

    def _check_quota(self, tenant_folder: Path, header: UploadHeader) -> None:
        held = [known.size_bytes for folder in _folders(tenant_folder) if (known := _header_in(folder)) is not None]
        if sum(held) + header.size_bytes > self._limits.tenant_bytes:
            raise QuotaExceeded(quota='upload_bytes', limit=self._limits.tenant_bytes)
        if len(held) >= _MOST_UPLOADS:
            raise QuotaExceeded(quota='uploads', limit=_MOST_UPLOADS)

    def _discard_expired(self) -> None:
        oldest = (self._clock.now() - self._limits.time_to_live).timestamp()
        for folder in (folder for tenant_folder in _folders(self._root) for folder in _folders(tenant_folder)):
            file = folder / _BYTES
            if folder not in self._open and (not file.exists() or file.stat().st_mtime < oldest):
                shutil.rmtree(folder, ignore_errors=True)

    def _read(self, folder: Path) -> bytes | None:
        with self._lock:
            self._discard_expired()
            header = _header_in(folder)
            if header is None or (folder / _BYTES).stat().st_size != header.size_bytes:
                return None
            data = (folder / _BYTES).read_bytes()
            self.touch(folder)
        return data if blake3(data).hexdigest() == header.digest else None

    def _folder(self, tenant_id: str, upload_id: str) -> Path:
        # Ids are the caller's: hashed, they are safe as names, and tenants cannot meet.
        return self._root / _name_of(tenant_id) / _name_of(upload_id)


class UploadFile:
    """One upload; implements `Upload`."""

    def __init__(self, files: UploadFiles, folder: Path, header: UploadHeader, committed_bytes: int) -> None:
        """Go on with the upload in `folder`."""
        self._files, self._folder, self._header = files, folder, header
        self._committed_bytes = committed_bytes

    @property
    def committed_bytes(self) -> int:
        """Bytes kept, from the beginning."""
        return self._committed_bytes

    async def add(self, data: bytes) -> None:
        """Keep the next bytes."""
        await asyncio.to_thread(_append, self._folder / _BYTES, data)
        self._committed_bytes += len(data)

    async def verify(self) -> None:
        """Check the whole; see the port."""
        actual = await asyncio.to_thread(_digest_of, self._folder / _BYTES)
        if actual != self._header.digest:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            raise DigestMismatch(expected=self._header.digest, actual=actual)

    async def close(self) -> None:
        """Let another stream go on with it."""
        if (self._folder / _BYTES).exists():
            self._files.touch(self._folder)
        self._files.release(self._folder)


def _name_of(identity: str) -> str:
    return blake2s(identity.encode(), digest_size=16).hexdigest()


def _folders(parent: Path) -> Iterator[Path]:
    return iter(sorted(parent.iterdir()) if parent.is_dir() else ())


def _header_in(folder: Path) -> UploadHeader | None:
    with suppress(FileNotFoundError):
        return _HEADER.validate_json((folder / _RECORD).read_bytes())
    return None


def _begin(folder: Path, header: UploadHeader) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _BYTES).write_bytes(b'')
    # The header comes last and whole: a folder without one is not there.
    staging = folder / f'{_RECORD}.new'
    staging.write_bytes(_HEADER.dump_json(header))
    staging.replace(folder / _RECORD)


def _append(path: Path, data: bytes) -> None:
    with path.open('ab') as file:
        file.write(data)


def _digest_of(path: Path) -> str:
    with path.open('rb') as file:
        hasher = blake3()
        while piece := file.read(1 << 20):
            hasher.update(piece)
    return hasher.hexdigest()
