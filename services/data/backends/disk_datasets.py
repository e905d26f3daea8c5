"""Stores datasets on the local disk: a folder for each dataset, with a record and the rows of its revision.

The rows of a new revision are written to a new folder, and become current when the record is replaced. The next start
removes all files that a crash left incomplete.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from services.data.backends.record_files import RecordFiles, sync_folder
from services.data.backends.row_files import RowFiles, write_rows
from services.data.domain import Dataset, Row, RowMeter, Table
from services.kit.checksums import check_sums, write_sums
from services.kit.errors import InvalidField, StoredDataDamaged
from services.kit.worker import Threads
from twinkle.dataset import UnreadableFile, counted
from twinkle.dataset import write_rows as write_file

_log = structlog.get_logger('data')
_RECORD = 'record.json'


class DiskDatasets:
    """Stores datasets below one folder; implements `DatasetStore`."""

    def __init__(self, root: Path, threads: Threads) -> None:
        """Open the store at `root`, with its datasets of earlier runs."""
        self._root, self._threads = root, threads
        self._records = RecordFiles(Dataset)
        root.mkdir(parents=True, exist_ok=True)
        found = dict(self._records.read_all(root, f'*/{_RECORD}'))
        self._known = {dataset.dataset_id: dataset for dataset in found.values() if dataset is not None}
        self._damaged = {path.parent.name for path, dataset in found.items() if dataset is None}
        self._intact = set[Path]()
        """Folders whose files were compared with their digests since the start."""
        self._remove_incomplete()

    def get(self, dataset_id: str) -> Dataset | None:
        if dataset_id in self._damaged:
            raise StoredDataDamaged('dataset', dataset_id)
        return self._known.get(dataset_id)

    def of_tenant(self, tenant_id: str) -> list[Dataset]:
        return [dataset for dataset in self._known.values() if dataset.tenant_id == tenant_id]

    async def save(self, dataset: Dataset, table: Table) -> Dataset:
        # The index must match the disk even if the caller is cancelled.
        return await asyncio.shield(self._save(dataset, table))

    async def stored_bytes(self, tenant_id: str) -> int:
        folders = [self._root / dataset.dataset_id for dataset in self.of_tenant(tenant_id)]
        return await self._threads.run(lambda: sum(map(_size_of_files, folders)))

    async def load(self, dataset: Dataset, meter: RowMeter) -> Table:
        rows = await self._threads.run(lambda: list(counted(self._opened(dataset), meter)))
        return Table(
            rows=rows,
            dataset_id=dataset.dataset_id,
            is_encoded=dataset.is_encoded,
            is_packed=dataset.is_packed,
            is_lazy=dataset.is_lazy,
            pending=dataset.pending,
            template=dataset.template,
        )

    def reader(self, dataset: Dataset) -> 'DiskRows':
        files = self._open(dataset)
        return DiskRows(files, self._threads, check=lambda: self._check(dataset))

    async def export(self, dataset: Dataset, file_format: str) -> 'DiskFile':
        """Return the dataset as a file; the first call writes it."""
        path = self._rows_of(dataset) / f'export.{file_format}'
        try:
            if not path.exists():
                await self._threads.run(lambda: write_file(path, self._opened(dataset)))
        except UnreadableFile as error:
            raise InvalidField('format', str(error)) from error
        return DiskFile(path, self._threads)

    async def delete(self, dataset: Dataset) -> None:
        self._known.pop(dataset.dataset_id, None)
        await asyncio.shield(self._threads.run(self._remove, dataset.dataset_id))

    async def _save(self, dataset: Dataset, table: Table) -> Dataset:
        saved = await self._threads.run(self._write, dataset, table)
        self._known[dataset.dataset_id] = saved
        return saved

    def _write(self, dataset: Dataset, table: Table) -> Dataset:
        rows_folder = self._rows_of(dataset)
        shutil.rmtree(rows_folder, ignore_errors=True)
        rows_folder.mkdir(parents=True)
        saved = replace(dataset, content_digest=_write_content(rows_folder, table))
        write_sums(rows_folder)
        self._intact.discard(rows_folder)
        sync_folder(rows_folder)
        self._records.write(rows_folder.parent / _RECORD, saved)
        sync_folder(self._root)
        self._remove_old_revisions(saved)
        return saved

    def _opened(self, dataset: Dataset) -> RowFiles:
        """Open the rows of a dataset after comparing all its files with their digests."""
        self._check(dataset)
        return self._open(dataset)

    def _open(self, dataset: Dataset) -> RowFiles:
        try:
            return RowFiles(self._rows_of(dataset))
        except Exception as error:  # numpy parses headers as Python code, which raises many errors
            raise _damage(dataset, error) from error

    def _check(self, dataset: Dataset) -> None:
        folder = self._rows_of(dataset)
        if folder in self._intact:
            return
        try:
            check_sums(folder)
        except (OSError, ValueError) as error:
            raise _damage(dataset, error) from error
        self._intact.add(folder)

    def _remove(self, dataset_id: str) -> None:
        # The record is removed first: the next start removes a folder without one.
        (self._root / dataset_id / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(self._root / dataset_id, ignore_errors=True)

    def _rows_of(self, dataset: Dataset) -> Path:
        return self._root / dataset.dataset_id / f'revision-{dataset.revision}'

    def _remove_old_revisions(self, dataset: Dataset) -> None:
        current = self._rows_of(dataset)
        for folder in current.parent.glob('revision-*'):
            if folder != current:
                shutil.rmtree(folder, ignore_errors=True)

    def _remove_incomplete(self) -> None:
        for folder in self._root.iterdir():
            if folder.name in self._known:
                self._remove_old_revisions(self._known[folder.name])
                for export in folder.glob('*/export.*'):
                    # Exported files have no digests, and are written again.
                    export.unlink()
            elif folder.is_dir() and folder.name not in self._damaged:
                shutil.rmtree(folder, ignore_errors=True)


def _damage(dataset: Dataset, error: Exception) -> StoredDataDamaged:
    _log.error('stored rows damaged', dataset=dataset.dataset_id, error=str(error))
    return StoredDataDamaged('dataset', dataset.dataset_id)


def _size_of_files(folder: Path) -> int:
    size_bytes = 0
    for path in folder.rglob('*'):
        # Another request may replace or delete the dataset.
        with suppress(FileNotFoundError):
            size_bytes += path.stat().st_size if path.is_file() else 0
    return size_bytes


def _write_content(folder: Path, table: Table) -> str:
    """Write a table's rows, and return the digest of the data that determines a loader's batches."""
    if not table.is_lazy:
        return write_rows(folder, table)
    raw = write_rows(folder, replace(table, is_encoded=False))
    steps = repr((raw, table.template, table.pending))
    return hashlib.blake2s(steps.encode()).hexdigest()


class DiskRows:
    """The rows of one revision; implements `RowReader`."""

    def __init__(self, files: RowFiles, threads: Threads, *, check: Callable[[], None]) -> None:
        """Read from `files`; `check` raises if they are damaged."""
        self._files, self._threads, self._check = files, threads, check

    async def read(self, indices: Sequence[int]) -> list[Row]:
        return await self._threads.run(self._read, indices)

    def _read(self, indices: Sequence[int]) -> list[Row]:
        self._check()
        return self._files.read(indices)


class DiskFile:
    """An exported file; implements `ExportedFile`."""

    def __init__(self, path: Path, threads: Threads) -> None:
        """Open `path`, which stays readable after the dataset changes."""
        self._file, self._threads = path.open('rb'), threads
        self._size_bytes = path.stat().st_size

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    async def read(self, offset: int, size_bytes: int) -> bytes:
        return await self._threads.run(self._read, offset, size_bytes)

    def _read(self, offset: int, size_bytes: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size_bytes)

    def __del__(self) -> None:
        self._file.close()
