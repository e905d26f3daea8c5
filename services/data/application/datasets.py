"""Datasets of a tenant: create, change, read, list, export and delete them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from twinkle.dataset import counted
from twinkle_services.data.application.tenant_locks import TenantLocks
from twinkle_services.data.domain import (
    Dataset,
    DatasetNotFound,
    DecodedBytes,
    DecodedLimits,
    HubSource,
    MixtureSource,
    Row,
    RowMeter,
    RowSource,
    Source,
    Step,
    Table,
    UploadSource,
)
from twinkle_services.data.domain.dataset import new_dataset
from twinkle_services.data.ports import DatasetStore, LoaderStore, RowEngine, RowReader
from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import InUse, InvalidField, QuotaExceeded, RequestIdReused, UploadNotFound
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.paging import Page, SortKey
from twinkle_services.kit.resumable_uploads import UploadStore

CHUNK_BYTES = 1 << 20
"""Size of the pieces of an exported file, in bytes; the last piece may be smaller."""
PEEKED_BYTES = 2 << 20
"""Maximum size in memory of the rows that one call of `peek` returns, in bytes."""
_LAST_STREAMED = 10_000
"""Maximum index of the first row that `peek` returns of a streamed dataset."""


@dataclass(frozen=True, kw_only=True)
class CreateRequest:
    """A request to create a dataset."""

    request_id: str
    fingerprint: str
    """Digest of the request's content."""
    source: Source
    steps: tuple[Step, ...]
    is_lazy: bool = False
    """See `Table`."""
    is_streamed: bool = False
    """Whether rows are read from the hub by each loader."""


@dataclass(frozen=True, kw_only=True)
class ApplyRequest:
    """A request to apply steps to a dataset."""

    request_id: str
    fingerprint: str
    """Digest of the request's content."""
    dataset_id: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of an exported file."""

    offset: int
    data: bytes


@dataclass(frozen=True, kw_only=True)
class PeekedRow:
    """A row for display."""

    index: int
    """Index of the row in the dataset."""
    row: Row | None = None
    """The row as a loader would read it; None if there is a problem."""
    problem: str = ''
    """Reason why the row cannot be returned."""


@dataclass(frozen=True, kw_only=True)
class DatasetLimits:
    """Limits on datasets. The limits outside `decoded` apply to each tenant separately."""

    decoded: DecodedLimits
    """Limits on rows in memory."""
    stored_bytes: int
    """Maximum size of the stored datasets, in bytes."""
    datasets: int
    """Maximum number of datasets."""
    queue_length: int
    """Maximum number of requests that wait for another change to finish."""


class Datasets:
    """Creates, changes, lists, exports and deletes datasets; the changes of one tenant run one at a time."""

    def __init__(
        self, store: DatasetStore, loaders: LoaderStore, uploads: UploadStore, engine: RowEngine, *, clock: Clock,
        limits: DatasetLimits,
    ) -> None:  # fmt: skip
        self._store, self._loaders, self._uploads, self._engine = store, loaders, uploads, engine
        self._clock, self._limits, self._decoded = clock, limits, DecodedBytes(limits.decoded)
        self._locks = TenantLocks(queue_limit=limits.queue_length)
        self._peek_locks = TenantLocks(queue_limit=limits.queue_length)

    async def create(self, caller: Caller, request: CreateRequest) -> Dataset:
        """Create a dataset, or return the dataset of an earlier request with the same id and content.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            RequestIdReused: An earlier request with this id had different content.
            QuotaExceeded, QueueFull: The tenant has too many datasets, rows, bytes or waiting requests.
            BytesFull: The datasets in preparation take too much memory.
            DatasetNotFound, UploadNotFound, HubIdNotFound: A part of a mixture, an upload, or a hub id was not found.
            InvalidField, UnknownComponent: A row, an argument or the name of a component is invalid, or the source
                cannot be used.
            DatasetNotReady: A step requires an earlier step that is missing, or was already applied.
            StoredDataDamaged, StoreUnavailable: Stored data is damaged, or the disk cannot be used at the moment.
        """
        require_scope(caller, 'data')
        async with self._locks.hold(caller.tenant_id):
            known = self._find_repeated(caller, request)
            if known is not None:
                return known
            with self._decoded.meter(caller.tenant_id) as meter:
                table = await self._new_table(caller, request, meter)
                if request.is_lazy and table.is_encoded:
                    raise InvalidField('is_lazy', 'must be false, because the parts of the mixture are already encoded')
                table = await self._engine.apply(replace(table, is_lazy=request.is_lazy), request.steps, meter)
                empty = new_dataset(new_id('ds'), tenant_id=caller.tenant_id, create_time=self._clock.now())
                dataset = await _changed(empty, table, request)
                await self._check_stored_bytes(caller.tenant_id, meter)
                return await self._store.save(dataset, table)

    async def apply(self, caller: Caller, request: ApplyRequest) -> Dataset:
        """Apply all steps, and return the changed dataset. If a step fails, the dataset is unchanged.

        A repeated request returns the dataset without another change.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            DatasetNotFound: The tenant has no such dataset.
            RequestIdReused: An earlier request with this id had different content.
            InUse: A loader is open for the dataset.
            QuotaExceeded, QueueFull: The tenant has too many rows, bytes or waiting requests.
            BytesFull: The datasets in preparation take too much memory.
            InvalidField, UnknownComponent: A row, an argument or the name of a component is invalid.
            DatasetNotReady: A step requires an earlier step that is missing, or was already applied.
            HubIdNotFound: The template's model was not found.
            StoredDataDamaged, StoreUnavailable: The dataset is damaged, or the disk cannot be used at the moment.
        """
        dataset_of(self._store, caller, request.dataset_id)
        async with self._locks.hold(caller.tenant_id):
            dataset = dataset_of(self._store, caller, request.dataset_id)
            fingerprint = dataset.fingerprint_of(request.request_id)
            if fingerprint == request.fingerprint:
                return dataset
            if fingerprint is not None:
                raise RequestIdReused(request.request_id)
            self._check_unused(dataset)
            with self._decoded.meter(caller.tenant_id) as meter:
                table = await self._engine.apply(await self._store.load(dataset, meter), request.steps, meter)
                changed = await _changed(dataset, table, request)
                await self._check_stored_bytes(caller.tenant_id, meter)
                # A loader may have been opened while the steps were applied, and its batches must not change.
                self._check_unused(dataset)
                return await self._store.save(changed, table)

    async def get(self, caller: Caller, dataset_id: str) -> Dataset:
        """Return a dataset.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            DatasetNotFound: The tenant has no such dataset.
            StoredDataDamaged: The stored description of the dataset is damaged.
        """
        return dataset_of(self._store, caller, dataset_id)

    async def list(self, caller: Caller, page: Page) -> tuple[list[Dataset], SortKey | None]:
        """Return a page of datasets, newest first, and the sort key of its last dataset if more follow.

        Datasets whose stored descriptions are damaged are not listed.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
        """
        require_scope(caller, 'data')
        # Ids begin with their creation time, so their order is the order of creation.
        owned = sorted(self._store.of_tenant(caller.tenant_id), key=_sort_key, reverse=True)
        following = [item for item in owned if page.after is None or _sort_key(item) < page.after]
        items = following[: page.size]
        return items, _sort_key(items[-1]) if len(following) > page.size else None

    async def stored_bytes(self, caller: Caller) -> tuple[int, int]:
        """Return the size in bytes of the tenant's datasets with their exported files, and of the tenant's uploads.

        Raises:
            StoreUnavailable: The disk cannot be used at the moment.
        """
        tenant_id = caller.tenant_id
        return await self._store.stored_bytes(tenant_id), await self._uploads.counted_bytes(tenant_id)

    async def export(self, caller: Caller, dataset_id: str, *, file_format: str, offset: int) -> AsyncGenerator[Piece]:
        """Yield the dataset as a file from byte `offset` on; the same revision always yields the same bytes.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            DatasetNotFound: The tenant has no such dataset.
            InvalidField: The dataset is lazy, the format cannot represent its rows, or the offset exceeds the file.
            QueueFull: Too many requests of the tenant are waiting.
            QuotaExceeded, BytesFull: The rows take too much memory.
            StoredDataDamaged, StoreUnavailable: The dataset is damaged, or the disk cannot be used at the moment.
        """
        dataset_of(self._store, caller, dataset_id)
        async with self._locks.hold(caller.tenant_id):
            dataset = dataset_of(self._store, caller, dataset_id)
            if dataset.is_lazy or dataset.stream is not None:
                problem = 'has rows that are computed only when a loader reads them; export an eager dataset'
                raise InvalidField('dataset_id', problem)
            with self._decoded.meter(caller.tenant_id) as meter:
                file = await self._store.export(dataset, file_format, meter, offset=offset)
        for begin in range(offset, file.size_bytes, CHUNK_BYTES):
            yield Piece(begin, await file.read(begin, CHUNK_BYTES))

    async def peek(self, caller: Caller, dataset_id: str, *, begin: int, count: int) -> Sequence[PeekedRow]:
        """Return at most `count` rows from index `begin` on; fewer if they take more than `PEEKED_BYTES` in memory.

        Only these rows are read. The steps of a lazy dataset are applied to them. A row that a step refuses is returned
        with the problem.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            DatasetNotFound: The tenant has no such dataset.
            HubIdNotFound, UnknownComponent: A pending step needs a model or a component that was removed.
            QuotaExceeded, BytesFull: A row takes too much memory.
            QueueFull: Too many calls of the tenant are waiting; only one of them reads rows at a time.
            StoredDataDamaged, StoreUnavailable: The dataset is damaged, or the disk cannot be used at the moment.
        """
        dataset_of(self._store, caller, dataset_id)
        found: list[PeekedRow] = []
        async with self._peek_locks.hold(caller.tenant_id):
            dataset = dataset_of(self._store, caller, dataset_id)
            if dataset.stream is not None:
                return await self._peek_stream(dataset, begin=begin, count=count)
            reader = await self._store.reader(dataset)
            if dataset.is_lazy and dataset.pending:
                reader = self._engine.lazy_reader(dataset, reader)
            with self._decoded.meter(caller.tenant_id) as meter:
                for index in range(begin, min(begin + count, dataset.row_count)):
                    item = await _peeked(reader, index, meter)
                    if found and meter.size_bytes > PEEKED_BYTES:
                        break
                    found.append(item)
        return found

    async def delete(self, caller: Caller, dataset_id: str) -> None:
        """Delete a dataset, even if it is damaged.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            DatasetNotFound: The tenant has no such dataset.
            StoredDataDamaged: The dataset is damaged, and its tenant is unknown.
            InUse: A loader is open for the dataset.
            QueueFull: Too many requests of the tenant are waiting.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        require_scope(caller, 'data')
        if await self._store.delete_damaged(caller.tenant_id, dataset_id):
            return
        dataset_of(self._store, caller, dataset_id)
        async with self._locks.hold(caller.tenant_id):
            dataset = dataset_of(self._store, caller, dataset_id)
            self._check_unused(dataset)
            await self._store.delete(dataset)

    def _find_repeated(self, caller: Caller, request: CreateRequest) -> Dataset | None:
        owned = self._store.of_tenant(caller.tenant_id)
        for dataset in owned:
            fingerprint = dataset.fingerprint_of(request.request_id)
            if fingerprint == request.fingerprint:
                return dataset
            if fingerprint is not None:
                raise RequestIdReused(request.request_id)
        if len(owned) >= self._limits.datasets:
            raise QuotaExceeded('datasets', self._limits.datasets)
        return None

    def _check_unused(self, dataset: Dataset) -> None:
        for loader in self._loaders.of_tenant(dataset.tenant_id):
            if loader.dataset_id == dataset.dataset_id:
                raise InUse('dataset', dataset.dataset_id, f'loader {loader.loader_id}')

    async def _check_stored_bytes(self, tenant_id: str, meter: RowMeter) -> None:
        """Refuse rows that would not fit into the tenant's storage; their size in memory is used as an estimate."""
        if await self._store.stored_bytes(tenant_id) + meter.size_bytes > self._limits.stored_bytes:
            raise QuotaExceeded('dataset_stored_bytes', self._limits.stored_bytes)

    async def _peek_stream(self, dataset: Dataset, *, begin: int, count: int) -> Sequence[PeekedRow]:
        if begin > _LAST_STREAMED:
            problem = f'is {begin}, must be at most {_LAST_STREAMED}, because a stream is read up to this row'
            raise InvalidField('begin_row', problem)
        rows = await self._engine.stream_rows(dataset, begin=begin, count=count)
        found: list[PeekedRow] = []
        with DecodedBytes(self._limits.decoded).meter(dataset.tenant_id) as meter:
            for index, row in enumerate(rows, start=begin):
                found.append(_peeked_of(row, index, meter))
                if meter.size_bytes > PEEKED_BYTES:
                    break
        return found

    async def _new_table(self, caller: Caller, request: CreateRequest, meter: RowMeter) -> Table:
        if request.is_lazy and request.is_streamed:
            raise InvalidField('is_lazy', 'must be false if is_streamed is true')
        if request.is_streamed and isinstance(request.source, HubSource):
            return Table(rows=[], stream=await self._engine.find_stream(request.source))
        if request.is_streamed and not isinstance(request.source, MixtureSource):
            raise InvalidField('is_streamed', 'must be false unless the source is hub or mixture; use is_lazy instead')
        table = await self._read(caller, request.source, meter)
        if request.is_streamed != (table.stream is not None):
            raise InvalidField('is_streamed', 'must be true if the parts of the mixture are streamed, otherwise false')
        return table

    async def _read(self, caller: Caller, source: Source, meter: RowMeter) -> Table:
        match source:
            case RowSource():
                return Table(rows=await asyncio.to_thread(lambda: list(counted(source.rows, meter))))
            case HubSource():
                return await self._engine.read_hub(source, meter)
            case UploadSource():
                return await self._read_upload(caller, source, meter)
            case MixtureSource():
                parts = [dataset_of(self._store, caller, dataset_id) for dataset_id in source.dataset_ids]
                tables = [await self._store.load(part, meter) for part in parts]
                return await self._engine.mix(tables, is_interleaved=source.is_interleaved)

    async def _read_upload(self, caller: Caller, source: UploadSource, meter: RowMeter) -> Table:
        upload = await self._uploads.find(caller.tenant_id, source.upload_id, is_content_read=True)
        if upload is None:
            raise UploadNotFound(source.upload_id)
        if not upload.is_complete:
            stored, size = upload.committed_bytes, upload.header.size_bytes
            problem = f'is not complete: {stored} of {size} bytes are stored; continue the upload'
            raise InvalidField('source.upload.upload_id', problem)
        return await self._engine.read_file(str(upload.path), source.file_format, meter)


def dataset_of(store: DatasetStore, caller: Caller, dataset_id: str) -> Dataset:
    """Return a dataset of the caller's tenant.

    Raises:
        ScopeMissing: The API key lacks the scope `data`.
        DatasetNotFound: The dataset does not exist or belongs to another tenant; the error does not reveal which.
        StoredDataDamaged: The stored description of the dataset is damaged.
    """
    require_scope(caller, 'data')
    dataset = store.get(caller.tenant_id, dataset_id)
    if dataset is None:
        raise DatasetNotFound(dataset_id)
    return dataset


async def _peeked(reader: RowReader, index: int, meter: RowMeter) -> PeekedRow:
    """Read and count a row; a row of more than `PEEKED_BYTES` is replaced by a problem."""
    try:
        [row] = await reader.read([index])
    except InvalidField as error:
        return _peeked_of(error, index, meter)
    return _peeked_of(row, index, meter)


def _peeked_of(row: Row | InvalidField, index: int, meter: RowMeter) -> PeekedRow:
    before_bytes = meter.size_bytes
    if isinstance(row, InvalidField):
        return PeekedRow(index=index, problem=str(row))
    [row] = counted([row], meter)
    size_bytes = meter.size_bytes - before_bytes
    if size_bytes > PEEKED_BYTES:
        return PeekedRow(index=index, problem=f'takes {size_bytes} bytes in memory, more than {PEEKED_BYTES}')
    return PeekedRow(index=index, row=row)


async def _changed(dataset: Dataset, table: Table, request: CreateRequest | ApplyRequest) -> Dataset:
    """Return the dataset after a request. A thread reads all rows, because there may be millions of them."""
    return await asyncio.to_thread(dataset.changed, table, request.steps, (request.request_id, request.fingerprint))


def _sort_key(dataset: Dataset) -> SortKey:
    return (dataset.dataset_id,)
