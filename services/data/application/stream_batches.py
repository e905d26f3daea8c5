"""Stream a loader's batches, as many as the reader has asked for."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.data.application.ownership import dataset_of, loader_of
from services.data.domain import MAX_CREDITS, Cursor, Loader, Row
from services.data.ports import DatasetStore, LoaderStore, RowEngine, RowReader
from services.kit.caller import Caller
from services.kit.errors import InvalidField, StreamOutOfOrder
from twinkle.dataloader import epoch_order


@dataclass(frozen=True)
class StreamStart:
    """Which loader, and from where."""

    loader_id: str
    cursor: Cursor | None
    """None: from the beginning."""
    is_trajectory_included: bool


@dataclass(frozen=True)
class Credits:
    """Allows this many more batches."""

    count: int


@dataclass(frozen=True)
class Batch:
    """Rows, and the position behind them."""

    rows: list[Row]
    cursor: Cursor
    epoch: int
    is_trajectory_included: bool


@dataclass(frozen=True)
class End:
    """There are no more batches."""

    cursor: Cursor
    epoch: int


class StreamBatches:
    """Reads loaders.

    Requests are read only when no credit is left, so whatever a reader sends ahead waits in the
    transport, and at most `MAX_CREDITS` batches are ever under way to it.
    """

    def __init__(self, store: DatasetStore, loaders: LoaderStore, engine: RowEngine) -> None:
        """Read what `loaders` are open; `engine` does what is still to be done to rows."""
        self._store, self._loaders, self._engine = store, loaders, engine

    async def __call__(
        self, caller: Caller, requests: AsyncIterator[StreamStart | Credits]
    ) -> AsyncGenerator[Batch | End]:
        """Yield a batch for each credit, and at the end one `End`.

        After the end the stream waits for the reader to end its side, and ignores what it still sends.
        A reader that ends its side early gets the batches it has credit for and no `End`.

        Raises:
            StreamOutOfOrder: the start is not first, or comes again.
            LoaderNotFound: not the caller's.
            InvalidField: the cursor fits another loader, there are too many credits, or a row of a lazy dataset
                cannot be worked out; names it.
        """
        start = await anext(requests, None)
        if not isinstance(start, StreamStart):
            raise StreamOutOfOrder('a start')
        loader = loader_of(self._loaders, caller, start.loader_id)
        dataset = dataset_of(self._store, caller, loader.dataset_id)
        if start.is_trajectory_included and dataset.is_packed:
            raise InvalidField('start.is_trajectory_included', 'must be false: a pack holds several chats')
        reader = self._store.reader(dataset)
        if dataset.is_lazy:
            reader = self._engine.working_out(dataset, reader)
        reading = _Reading(loader, reader, start)
        async for item in reading.follow(requests):
            yield item


class _Reading:
    """One stream's way through a loader."""

    def __init__(self, loader: Loader, reader: RowReader, start: StreamStart) -> None:
        self._loader, self._reader = loader, reader
        self._is_trajectory_included = start.is_trajectory_included
        self._consumed = 0 if start.cursor is None else loader.rows_before(start.cursor)
        self._epoch: int = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    async def follow(self, requests: AsyncIterator[StreamStart | Credits]) -> AsyncGenerator[Batch | End]:
        allowed = 0
        while self._loader.end_row is None or self._consumed < self._loader.end_row:
            if allowed == 0:
                request = await anext(requests, None)
                if request is None:
                    return
                allowed = _granted(request)
            allowed -= 1
            yield await self._next_batch()
        yield End(self._loader.cursor_at(self._consumed), max(self._epoch, 0))
        # A stream that ends while the reader still sends credits reaches some clients as an error of
        # the transport, so it is the reader who ends it.
        async for _ in requests:
            continue

    async def _next_batch(self) -> Batch:
        epoch, within = self._consumed // self._loader.epoch_rows, self._consumed % self._loader.epoch_rows
        if epoch != self._epoch:
            seed, size = self._loader.shuffle_seed, self._loader.row_count
            # Sorting millions of rows takes longer than the event loop may be away.
            self._order = await asyncio.to_thread(epoch_order, size, seed=seed, epoch=epoch)
            self._epoch = epoch
        end = min(within + self._loader.batch_size, self._loader.epoch_rows)
        rows = await self._reader.read(self._order[within:end].tolist())
        self._consumed += len(rows)
        return Batch(rows, self._loader.cursor_at(self._consumed), epoch, self._is_trajectory_included)


def _granted(request: StreamStart | Credits) -> int:
    if not isinstance(request, Credits):
        raise StreamOutOfOrder('credits')
    if not 1 <= request.count <= MAX_CREDITS:
        raise InvalidField('credits', f'must be from 1 to {MAX_CREDITS}, got {request.count}')
    return request.count
