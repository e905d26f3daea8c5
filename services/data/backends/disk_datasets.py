"""Stores datasets on the local disk: a folder for each dataset, with a record and the rows of its revision.

The rows of a new revision are written to a new folder, and become current when the record is replaced. The next start
removes all files that a crash left incomplete.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import structlog

from twinkle.dataset import UnreadableFile, counted
from twinkle.dataset import write_rows as write_file
from twinkle_services.data.backends.record_files import RecordFiles, sync_folder
from twinkle_services.data.backends.row_files import RowFiles, write_rows
from twinkle_services.data.domain import Dataset, Row, RowMeter, Table
from twinkle_services.kit.checksums import check_sums, checked, with_checksum, write_sums
from twinkle_services.kit.errors import DomainError, InvalidField, StoredDataDamaged, StoreUnavailable
from twinkle_services.kit.worker import Threads, completed

_log = structlog.get_logger('data')
_RECORD, _OWNER = 'record.json', 'owner'
_PIECE_ROWS, _PIECE_BYTES = 1000, 8 << 20
"""Maximum number of rows that an export converts together, and their approximate maximum size in memory."""
_TOKEN_BYTES = 200
"""Memory in bytes of a token with its label, position and weight as Python numbers."""
_DAMAGES = (None, errno.EIO, errno.ENOENT, errno.EISDIR, errno.ENOTDIR)
"""Numbers of system errors that indicate damaged files; None stands for errors of numpy, which have no number."""


class DiskDatasets:
    """Stores datasets below one folder; implements `DatasetStore`."""

    def __init__(self, root: Path, threads: Threads) -> None:
        """Open the store at `root`, including datasets of earlier runs."""
        self._root, self._threads = root, threads
        self._records = RecordFiles(Dataset)
        root.mkdir(parents=True, exist_ok=True)
        found = dict(self._records.read_all(root, f'*/{_RECORD}'))
        self._known = {dataset.dataset_id: dataset for dataset in found.values() if dataset is not None}
        self._damaged = {path.parent.name: _owner_in(path.parent) for path, dataset in found.items() if dataset is None}
        """Owners of the datasets with damaged records; None if the owner is unknown as well."""
        self._intact = set[Path]()
        """Folders whose files were compared with their digests since the start."""
        self._remove_incomplete()

    def get(self, tenant_id: str, dataset_id: str) -> Dataset | None:
        if dataset_id in self._damaged and self._damaged[dataset_id] in (tenant_id, None):
            raise StoredDataDamaged('dataset', dataset_id)
        dataset = self._known.get(dataset_id)
        return dataset if dataset is not None and dataset.tenant_id == tenant_id else None

    def of_tenant(self, tenant_id: str) -> list[Dataset]:
        return [dataset for dataset in self._known.values() if dataset.tenant_id == tenant_id]

    async def save(self, dataset: Dataset, table: Table) -> Dataset:
        # The change is completed even if the caller is cancelled, so that `_known` matches the disk and the caller
        # keeps its lock.
        return await completed(self._save(dataset, table))

    async def stored_bytes(self, tenant_id: str) -> int:
        folders = [self._root / dataset.dataset_id for dataset in self.of_tenant(tenant_id)]
        return await self._threads.run(lambda: sum(map(_size_of_files, folders)))

    async def load(self, dataset: Dataset, meter: RowMeter) -> Table:
        rows = await self._threads.run(self._load, dataset, meter)
        return Table(
            rows=rows,
            dataset_id=dataset.dataset_id,
            is_encoded=dataset.is_encoded,
            is_packed=dataset.is_packed,
            is_lazy=dataset.is_lazy,
            pending=dataset.pending,
            stream=dataset.stream,
            template=dataset.template,
        )

    async def reader(self, dataset: Dataset) -> 'DiskRows':
        files = await self._threads.run(self._open, dataset)
        return DiskRows(dataset, files, self._threads, check=lambda: self._check(dataset))

    async def export(self, dataset: Dataset, file_format: str, meter: RowMeter, *, offset: int) -> 'DiskFile':
        """Return the dataset as a file; the first call writes it."""
        # The caller's lock must be held until the thread has written the file, even if the caller is cancelled.
        exporting = self._threads.run(self._export, dataset, file_format, meter, offset=offset)
        try:
            return await completed(exporting)
        except UnreadableFile as error:
            raise InvalidField('format', str(error)) from error

    async def delete_damaged(self, tenant_id: str, dataset_id: str) -> bool:
        if self._damaged.get(dataset_id) != tenant_id:
            return False
        await self._threads.run(self._remove, dataset_id)
        self._damaged.pop(dataset_id, None)
        return True

    async def delete(self, dataset: Dataset) -> None:
        await completed(self._delete(dataset))

    def _load(self, dataset: Dataset, meter: RowMeter) -> list[Row]:
        rows = self._opened(dataset)
        with _damages(dataset):
            return list(counted(rows, meter))

    async def _save(self, dataset: Dataset, table: Table) -> Dataset:
        saved = await self._threads.run(self._write, dataset, table)
        self._known[dataset.dataset_id] = saved
        return saved

    async def _delete(self, dataset: Dataset) -> None:
        self._known.pop(dataset.dataset_id, None)
        try:
            await self._threads.run(self._remove, dataset.dataset_id)
        except StoreUnavailable:
            self._known[dataset.dataset_id] = dataset
            raise

    def _export(self, dataset: Dataset, file_format: str, meter: RowMeter, *, offset: int) -> 'DiskFile':
        path = self._rows_of(dataset) / f'export.{file_format}'
        is_new = not path.exists()
        if is_new:
            rows = self._opened(dataset)
            # Rows are counted only for formats with columns, because JSONL is written row by row.
            charged = rows if file_format == 'jsonl' else counted(rows, meter)
            write_file(path, charged, batch_rows=_rows_per_piece(dataset))
        size_bytes = path.stat().st_size
        if offset > size_bytes:
            if is_new:
                path.unlink()
            raise InvalidField('offset', f'is {offset}, must be at most {size_bytes}, the size of the file')
        return DiskFile(path, self._threads)

    def _write(self, dataset: Dataset, table: Table) -> Dataset:
        rows_folder = self._rows_of(dataset)
        shutil.rmtree(rows_folder, ignore_errors=True)
        try:
            rows_folder.mkdir(parents=True)
            _write_owner(rows_folder.parent, dataset.tenant_id)
            saved = replace(dataset, content_digest=_write_content(rows_folder, table))
            write_sums(rows_folder)
            self._intact.discard(rows_folder)
            sync_folder(rows_folder)
            self._records.write(rows_folder.parent / _RECORD, saved)
            sync_folder(self._root)
        except OSError:
            self._undo(dataset)
            raise
        self._remove_old_revisions(saved)
        return saved

    def _undo(self, dataset: Dataset) -> None:
        """Restore the previous record, and remove the rows of a revision that could not be written."""
        previous = self._known.get(dataset.dataset_id)
        # If the old record cannot be written either, the new rows remain, because the new record may name them.
        with suppress(OSError):
            if previous is None:
                self._remove(dataset.dataset_id)
            else:
                self._records.write(self._root / dataset.dataset_id / _RECORD, previous)
                shutil.rmtree(self._rows_of(dataset), ignore_errors=True)

    def _opened(self, dataset: Dataset) -> RowFiles:
        """Open the rows of a dataset after comparing all its files with their digests."""
        self._check(dataset)
        return self._open(dataset)

    def _open(self, dataset: Dataset) -> RowFiles:
        with _damages(dataset):
            return RowFiles(self._rows_of(dataset))

    def _check(self, dataset: Dataset) -> None:
        folder = self._rows_of(dataset)
        if folder in self._intact:
            return
        with _damages(dataset):
            check_sums(folder)
        self._intact.add(folder)

    def _remove(self, dataset_id: str) -> None:
        # The record is removed first: the next start removes folders without a record.
        (self._root / dataset_id / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(self._root / dataset_id, ignore_errors=True)

    def _rows_of(self, dataset: Dataset) -> Path:
        return self._root / dataset.dataset_id / f'revision-{dataset.revision}'

    def _remove_old_revisions(self, dataset: Dataset) -> None:
        """Remove the rows of earlier revisions, as far as the disk permits; the next start removes the others."""
        current = self._rows_of(dataset)
        with suppress(OSError):
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


def _write_owner(folder: Path, tenant_id: str) -> None:
    """Store a dataset's owner next to its record, so that the owner can delete it even if the record is damaged."""
    if not (folder / _OWNER).exists():
        (folder / _OWNER).write_bytes(with_checksum(tenant_id.encode()))


def _owner_in(folder: Path) -> str | None:
    with suppress(OSError, ValueError):
        return checked((folder / _OWNER).read_bytes()).decode()
    return None


@contextmanager
def _damages(dataset: Dataset) -> Generator[None]:
    """Convert the errors of damaged rows; the errors of a disk that cannot be used are raised unchanged."""
    try:
        yield
    except DomainError:  # for example a refusal of the meter
        raise
    except Exception as error:  # numpy parses headers as Python code, which raises many kinds of errors
        if isinstance(error, OSError) and error.errno not in _DAMAGES:
            raise
        _log.error('stored rows damaged', dataset=dataset.dataset_id, error=str(error))
        raise StoredDataDamaged('dataset', dataset.dataset_id) from error


def _rows_per_piece(dataset: Dataset) -> int:
    """Return the number of rows that are converted together, so that a piece takes at most about 8 MiB."""
    row_bytes = _TOKEN_BYTES * dataset.token_count // max(dataset.row_count, 1)
    return max(1, min(_PIECE_ROWS, _PIECE_BYTES // (row_bytes + 1)))


def _size_of_files(folder: Path) -> int:
    size_bytes = 0
    for path in folder.rglob('*'):
        # Another request may replace or delete the dataset.
        with suppress(FileNotFoundError):
            size_bytes += path.stat().st_size if path.is_file() else 0
    return size_bytes


def _write_content(folder: Path, table: Table) -> str:
    """Write a table's rows, and return the digest of the data that determines a loader's batches."""
    if not table.is_lazy and table.stream is None:
        return write_rows(folder, table)
    raw = write_rows(folder, replace(table, is_encoded=False))
    source = () if table.stream is None else (table.stream,)
    steps = repr((raw, table.template, table.pending, *source))
    return hashlib.blake2s(steps.encode()).hexdigest()


class DiskRows:
    """The rows of one revision; implements `RowReader`."""

    def __init__(self, dataset: Dataset, files: RowFiles, threads: Threads, *, check: Callable[[], None]) -> None:
        """Create a reader of the rows of `dataset` in `files`; `check` raises an error if files are damaged."""
        self._dataset, self._files, self._threads, self._check = dataset, files, threads, check

    async def read(self, indices: Sequence[int]) -> list[Row]:
        return await self._threads.run(self._read, indices)

    def _read(self, indices: Sequence[int]) -> list[Row]:
        self._check()
        with _damages(self._dataset):
            return self._files.read(indices)


class DiskFile:
    """An exported file; implements `ExportedFile`."""

    _file: BinaryIO | None = None

    def __init__(self, path: Path, threads: Threads) -> None:
        """Open `path`, which stays readable after the dataset changes."""
        self._file, self._threads = path.open('rb'), threads
        self._descriptor = self._file.fileno()
        self._size_bytes = path.stat().st_size

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    async def read(self, offset: int, size_bytes: int) -> bytes:
        return await self._threads.run(self._read, offset, size_bytes)

    def _read(self, offset: int, size_bytes: int) -> bytes:
        return os.pread(self._descriptor, size_bytes, offset)

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()
