"""Uploads on the local disk: the bytes so far, and a record of how many there will be."""

import hashlib
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from services.data.backends.record_files import RecordFiles
from services.kit.errors import InUse, InvalidField
from services.kit.worker import Threads

_RECORD, _BYTES = 'record.json', 'bytes'


@dataclass(frozen=True)
class UploadRecord:
    """What was announced."""

    tenant_id: str
    upload_id: str
    size_bytes: int


class UploadFiles:
    """Keeps uploads below one folder; implements `UploadStore`."""

    def __init__(self, root: Path, threads: Threads) -> None:
        """Open the store at `root`, as it was left."""
        self._root, self._threads = root, threads
        self._records = RecordFiles(UploadRecord)
        self._open: set[Path] = set()
        root.mkdir(parents=True, exist_ok=True)

    async def open(self, tenant_id: str, upload_id: str, *, size_bytes: int) -> 'UploadFile':
        """Return an upload to write to, where it stands."""
        folder = self._folder(tenant_id, upload_id)
        if folder in self._open:
            raise InUse('upload', upload_id, 'another stream')
        self._open.add(folder)
        try:
            record = await self._threads.run(
                self._find_or_begin, folder, UploadRecord(tenant_id, upload_id, size_bytes)
            )
            if record.size_bytes != size_bytes:
                raise InvalidField('header.size_bytes', f'was {record.size_bytes} when the upload was begun')
            return UploadFile(self, folder, record)
        except BaseException:
            self._open.discard(folder)
            raise

    async def find(self, tenant_id: str, upload_id: str) -> 'UploadFile | None':
        """Return an upload to look at."""
        folder = self._folder(tenant_id, upload_id)
        records = await self._threads.run(lambda: list(self._records.read_all(folder, _RECORD)))
        return UploadFile(self, folder, records[0]) if records else None

    async def discard_older(self, than: datetime) -> None:
        """Delete uploads nothing was added to since."""
        await self._threads.run(self._discard_older, than)

    async def add(self, folder: Path, data: bytes) -> None:
        """Append to an upload's bytes."""
        await self._threads.run(_append, folder / _BYTES, data)

    def release(self, folder: Path) -> None:
        """Let another stream write to an upload."""
        self._open.discard(folder)

    def _find_or_begin(self, folder: Path, wanted: UploadRecord) -> UploadRecord:
        found = list(self._records.read_all(folder, _RECORD))
        if found:
            return found[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _BYTES).touch()
        self._records.write(folder / _RECORD, wanted)
        return wanted

    def _discard_older(self, than: datetime) -> None:
        for folder in self._root.iterdir():
            file = folder / _BYTES
            changed = file.stat().st_mtime if file.exists() else 0.0
            if folder not in self._open and datetime.fromtimestamp(changed, tz=UTC) < than:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, tenant_id: str, upload_id: str) -> Path:
        # Ids are the caller's: hashed, they are safe as names, and tenants cannot meet.
        return self._root / hashlib.blake2s(f'{tenant_id}\0{upload_id}'.encode(), digest_size=16).hexdigest()


class UploadFile:
    """One upload; implements `Upload`."""

    def __init__(self, files: UploadFiles, folder: Path, record: UploadRecord) -> None:
        """Look at the upload in `folder`."""
        self._files, self._folder, self._record = files, folder, record

    @property
    def upload_id(self) -> str:
        """Id the caller chose."""
        return self._record.upload_id

    @property
    def committed_bytes(self) -> int:
        """Bytes kept, from the beginning."""
        return (self._folder / _BYTES).stat().st_size

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return self._record.size_bytes

    @property
    def path(self) -> str:
        """Where the bytes are, on this machine."""
        return str(self._folder / _BYTES)

    async def add(self, data: bytes) -> None:
        """Keep the next bytes."""
        await self._files.add(self._folder, data)

    async def close(self) -> None:
        """Let another stream go on with it."""
        self._files.release(self._folder)


def _append(path: Path, data: bytes) -> None:
    with path.open('ab') as file:
        file.write(data)
