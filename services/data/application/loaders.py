"""Loaders of datasets: open and close them, and stream their batches."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinkle.dataloader import epoch_order
from twinkle_services.data.application.datasets import dataset_of
from twinkle_services.data.application.live_streams import LiveStreams
from twinkle_services.data.domain import MAX_CREDITS, Cursor, Dataset, DatasetNotReady, Loader, LoaderNotFound, Row
from twinkle_services.data.ports import BatchStream, DatasetStore, LoaderStore, RowEngine, RowReader
from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.errors import (
    InvalidField,
    QuotaExceeded,
    RequestIdReused,
    StoredDataDamaged,
    StreamOutOfOrder,
)
from twinkle_services.kit.ids import new_id


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """A request to open a loader; see `Loader` for the meaning of the fields."""

    request_id: str
    fingerprint: str
    """Digest of the request's content."""
    dataset_id: str
    batch_size: int
    shuffle_seed: int | None
    epoch_count: int
    is_last_partial_dropped: bool


@dataclass(frozen=True)
class StreamStart:
    """The first message of a stream of batches."""

    loader_id: str
    cursor: Cursor | None
    """Position of the first batch; None for the beginning."""
    is_trajectory_included: bool
    """Whether each batch includes the chats from which its rows were encoded."""


@dataclass(frozen=True)
class Credits:
    """Permission to send more batches to the reader."""

    count: int
    """Number of additional batches, 1 to `MAX_CREDITS`."""


@dataclass(frozen=True)
class Batch:
    """The rows of a batch, and the position after it."""

    rows: list[Row]
    cursor: Cursor
    epoch: int
    is_trajectory_included: bool


@dataclass(frozen=True)
class End:
    """The end of a loader's last epoch."""

    cursor: Cursor
    epoch: int


class Loaders:
    """Opens, reads and closes loaders."""

    def __init__(
        self, store: DatasetStore, loaders: LoaderStore, engine: RowEngine, streams: LiveStreams, *, limit: int
    ) -> None:
        """Allow each tenant to have at most `limit` open loaders."""
        self._store, self._loaders, self._engine, self._limit = store, loaders, engine, limit
        self._streams = streams

    async def open(self, caller: Caller, request: OpenRequest) -> Loader:
        """Open a loader, or return the loader of an earlier request with the same id and content.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            DatasetNotFound: The tenant has no such dataset.
            DatasetNotReady: The dataset is not encoded.
            RequestIdReused: An earlier request with this id had different content.
            QuotaExceeded: The tenant has too many open loaders.
            StoredDataDamaged, StoreUnavailable: The dataset is damaged, or the disk cannot be used at the moment.
        """
        dataset = dataset_of(self._store, caller, request.dataset_id)
        opened = self._loaders.of_tenant(caller.tenant_id)
        for loader in opened:
            if loader.request_id == request.request_id:
                if loader.fingerprint != request.fingerprint:
                    raise RequestIdReused(request.request_id)
                return loader
        if not dataset.is_encoded:
            problem = 'the dataset is not encoded; apply set_template and encode first'
            raise DatasetNotReady(dataset.dataset_id, 'encode', problem)
        if len(opened) >= self._limit:
            raise QuotaExceeded('open_loaders', self._limit)
        loader = Loader(
            loader_id=new_id('ld'),
            tenant_id=caller.tenant_id,
            dataset_id=dataset.dataset_id,
            content_digest=dataset.content_digest,
            row_count=dataset.row_count,
            batch_size=request.batch_size,
            shuffle_seed=request.shuffle_seed,
            epoch_count=request.epoch_count,
            is_last_partial_dropped=request.is_last_partial_dropped,
            request_id=request.request_id,
            fingerprint=request.fingerprint,
            is_streamed=dataset.stream is not None,
        )
        await self._loaders.save(loader)
        return loader

    async def stream(
        self, caller: Caller, requests: AsyncIterator[StreamStart | Credits]
    ) -> AsyncGenerator[Batch | End]:
        """Yield one batch per credit, and one `End` after the last batch.

        The next request is read only when all credits are used, so that at most `MAX_CREDITS` batches are in transit to
        the reader. Further requests wait in the transport. After `End` the stream waits until the reader closes its
        side, and ignores further requests. A reader that closes its side early receives the batches of its credits but
        no `End`.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            StreamOutOfOrder: The first request is not a start, or a start is repeated.
            LoaderNotFound: The tenant has no such loader.
            InvalidField: The cursor does not belong to the loader, a number of credits is out of range, a row of a lazy
                dataset cannot be computed, or chats of packed rows are requested. The field `start.loader_id` means
                that the dataset changed while the loader was opened.
            PositionNotReached: The stream of a streamed dataset is still being read up to the cursor.
            QueueFull: Too many streamed datasets are being read.
            StoredDataDamaged, StoreUnavailable: Stored data is damaged, or the disk cannot be used at the moment.
        """
        start = await anext(requests, None)
        if not isinstance(start, StreamStart):
            raise StreamOutOfOrder('a start')
        loader = self._loader_of(caller, start.loader_id)
        dataset = dataset_of(self._store, caller, loader.dataset_id)
        _check_unchanged(loader, dataset)
        if start.is_trajectory_included and dataset.is_packed:
            problem = 'must be false, because a packed row contains several chats'
            raise InvalidField('start.is_trajectory_included', problem)
        if dataset.stream is not None:
            async with self._streams.of(dataset, loader, start.cursor) as stream:
                async for item in _follow(stream, loader, requests, start):
                    yield item
            return
        source = _IndexedSource(loader, await self._reader_of(caller, loader, dataset), start)
        async for item in _follow(source, loader, requests, start):
            yield item

    async def close(self, caller: Caller, loader_id: str) -> None:
        """Close a loader; if the tenant has no such loader, do nothing.

        Raises:
            ScopeMissing: The API key lacks the scope `data`.
            StoredDataDamaged, StoreUnavailable: The loader is damaged, or the disk cannot be used at the moment.
        """
        require_scope(caller, 'data')
        loader = self._loaders.get(loader_id)
        if loader is not None and loader.tenant_id == caller.tenant_id:
            self._streams.close(loader_id)
            await self._loaders.delete(loader_id)

    async def _reader_of(self, caller: Caller, loader: Loader, dataset: Dataset) -> RowReader:
        try:
            reader = await self._store.reader(dataset)
        except StoredDataDamaged:
            # The files may be missing because the loader was closed, or was opened while its dataset changed. In
            # these cases, the calls below raise the matching error.
            self._loader_of(caller, loader.loader_id)
            _check_unchanged(loader, dataset_of(self._store, caller, loader.dataset_id))
            raise
        return self._engine.lazy_reader(dataset, reader) if dataset.is_lazy else reader

    def _loader_of(self, caller: Caller, loader_id: str) -> Loader:
        """Return a loader of the caller's tenant; the error does not reveal whether another tenant has it."""
        require_scope(caller, 'data')
        loader = self._loaders.get(loader_id)
        if loader is None or loader.tenant_id != caller.tenant_id:
            raise LoaderNotFound(loader_id)
        return loader


class _IndexedSource:
    """Reads the batches of stored rows. Holds the position in the loader, and the row order of the current epoch."""

    def __init__(self, loader: Loader, reader: RowReader, start: StreamStart) -> None:
        self._loader, self._reader = loader, reader
        self.consumed = 0 if start.cursor is None else loader.rows_before(start.cursor)
        self._epoch: int = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def is_at_end(self) -> bool:
        """Whether no batch follows."""
        return self._loader.end_row is not None and self.consumed >= self._loader.end_row

    async def next(self) -> tuple[list[Row], int] | None:
        """Return the rows of the next batch and their epoch."""
        epoch, begin = self.consumed // self._loader.epoch_rows, self.consumed % self._loader.epoch_rows
        if epoch != self._epoch:
            seed, size = self._loader.shuffle_seed, self._loader.row_count
            # Computing the order of millions of rows would block the event loop for too long.
            self._order = await asyncio.to_thread(epoch_order, size, seed=seed, epoch=epoch)
            self._epoch = epoch
        end = min(begin + self._loader.batch_size, self._loader.epoch_rows)
        rows = await self._reader.read(self._order[begin:end].tolist())
        self.consumed += len(rows)
        return rows, epoch


async def _follow(
    source: '_IndexedSource | BatchStream', loader: Loader, requests: AsyncIterator[StreamStart | Credits],
    start: StreamStart,
) -> AsyncGenerator[Batch | End]:  # fmt: skip
    """Yield a batch per credit, and the end; see `Loaders.stream`."""
    credit_count = epoch = 0
    while not (isinstance(source, _IndexedSource) and source.is_at_end):
        if credit_count == 0:
            request = await anext(requests, None)
            if request is None:
                return
            credit_count = _credit_count(request)
        credit_count -= 1
        found = await source.next()
        if found is None:
            break
        rows, epoch = found
        yield Batch(rows, loader.cursor_at(source.consumed), epoch, start.is_trajectory_included)
    yield End(loader.cursor_at(source.consumed), epoch)
    # Some clients report a transport error if the server closes the stream while they are still sending credits, so
    # the server waits until the reader closes it.
    async for _ in requests:
        continue


def _check_unchanged(loader: Loader, dataset: Dataset) -> None:
    if dataset.content_digest != loader.content_digest:
        problem = 'was opened while its dataset changed; close it and open another loader'
        raise InvalidField('start.loader_id', problem)


def _credit_count(request: StreamStart | Credits) -> int:
    if not isinstance(request, Credits):
        raise StreamOutOfOrder('credits')
    if not 1 <= request.count <= MAX_CREDITS:
        raise InvalidField('credits', f'must be from 1 to {MAX_CREDITS}, got {request.count}')
    return request.count
