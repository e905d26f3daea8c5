"""Streamed datasets, whose rows are read from a hub and changed while a loader reads them."""

import asyncio
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import structlog

from twinkle.dataloader.ranks import RankSlice
from twinkle.dataloader.replacing import ReplacementLog
from twinkle.dataloader.sources import Layout, Position, StreamedBatches
from twinkle.dataset import DatasetError, DatasetMeta, IterablePackingDataset, RefusedRow, size_in_memory
from twinkle.dataset.streams import BATCH_ROWS
from twinkle.hub import HubError
from twinkle_services.data.backends.hub_rows import HubAccess, StreamedRows
from twinkle_services.data.backends.library_errors import row_error, source_errors
from twinkle_services.data.backends.pending_steps import TemplateOf, add_step, with_pending
from twinkle_services.data.backends.row_files import as_stored
from twinkle_services.data.domain import (
    Dataset,
    Loader,
    PositionNotReached,
    Row,
    RowMeter,
    StreamMixture,
    StreamPart,
    TemplateStep,
)
from twinkle_services.kit.errors import InvalidField, ServiceUnreachable

_log = structlog.get_logger('data')

REACH_SECONDS = 30.0
"""Time in seconds for which a call waits while the stream is read up to its position; less than clients' deadlines."""
_SHUFFLE_BUFFER = 1000
"""Number of rows in the buffer that shuffles a stream."""


@dataclass(frozen=True)
class StreamReader:
    """Creates iterations over the rows of streamed datasets."""

    template_of: TemplateOf
    access: HubAccess
    memory_bytes: int
    """Maximum memory of a process that reads rows."""

    @contextmanager
    def opened(self, dataset: Dataset, meter: RowMeter) -> Generator[tuple[list[StreamedRows], '_Rows']]:
        """Return the stored rows of the parts of a streamed dataset, and its rows after the pending steps."""
        stored = [self._stored(part, dataset, meter) for part in dataset.stream_parts]
        with source_errors('dataset_id', hub_id=dataset.template.base_model if dataset.template else ''):
            view = with_pending(_mixed(dataset, stored), dataset, self.template_of)
        try:
            yield stored, _Rows(view, stored, dataset, meter)
        except HubError as error:
            _log.warning('hub unreachable', dataset=dataset.dataset_id, error=str(error))
            raise ServiceUnreachable('hub') from error
        except DatasetError as error:
            raise InvalidField('dataset_id', str(error)) from error

    def _stored(self, part: StreamPart, dataset: Dataset, meter: RowMeter) -> StreamedRows:
        return StreamedRows(
            part.stream,
            meter,
            access=self.access,
            memory_bytes=self.memory_bytes,
            read_ahead=BATCH_ROWS * (len(part.pending) + len(dataset.pending) + 1),
        )

    def rows(self, dataset: Dataset, meter: RowMeter, *, begin: int, count: int) -> list[Row | InvalidField]:
        """Return some rows after the pending steps, or the errors of rows; see `RowEngine.stream_rows`."""
        with self.opened(dataset, meter) as (_, rows), closing(rows.measured()) as items:
            return [item for item, _ in islice(items, begin, begin + count)]


def _mixed(dataset: Dataset, stored: Sequence[StreamedRows]) -> IterablePackingDataset:
    """Return the stored rows of a dataset as one stream, after the steps of its parts."""
    view = IterablePackingDataset()
    for part, rows in zip(dataset.stream_parts, stored, strict=True):
        meta = DatasetMeta(data=rows)
        view.add_dataset(meta)
        for step in part.pending:
            add_step(view, step, meta)
    view.mix_dataset(interleave=isinstance(dataset.stream, StreamMixture) and dataset.stream.is_interleaved)
    return view


class _Rows:
    """The rows of a stream after its pending steps, each with its size; the sizes are charged to the meter."""

    def __init__(
        self, view: IterablePackingDataset, stored: Sequence[StreamedRows], dataset: Dataset, meter: RowMeter
    ) -> None:
        self._view, self._stored, self._dataset, self._meter = view, stored, dataset, meter

    def __iter__(self) -> Iterator[tuple[Row, int]]:
        with closing(self.measured()) as items:
            for item, size_bytes in items:
                if isinstance(item, InvalidField):
                    raise item
                yield item, size_bytes

    def measured(self) -> Generator[tuple[Row | InvalidField, int]]:
        """Yield the rows and the errors of rows. The processes of all parts end with the iteration.

        If the process of a part of an interleaved mixture fails, its error is raised before the next row of any part,
        although the part may have earlier rows that were not yielded.
        """
        parts = self._stored[: self._dataset.process_count]
        with ExitStack() as processes:
            for rows in self._stored:
                processes.callback(rows.close)
            # Processes take seconds to open their files, so those that are read at the same time start together.
            for rows in parts:
                rows.start()
            yield from self._measured(parts if len(parts) > 1 else [])

    def _measured(self, parts: Sequence[StreamedRows]) -> Iterator[tuple[Row | InvalidField, int]]:
        for item in self._view.items():
            for rows in parts:
                rows.raise_failure()
            if isinstance(item, RefusedRow):
                yield self._problem_of(item), 0
                continue
            row = as_stored(item, has_positions=self._dataset.is_packed) if self._dataset.is_encoded else item
            size_bytes = size_in_memory(row)
            self._meter.charge(size_bytes, 1)
            yield row, size_bytes

    def _problem_of(self, refused: RefusedRow) -> InvalidField:
        """Return the error of the step that refused a row, with the name of its part if the part has the step."""
        part, dataset = self._dataset.stream_parts[refused.part], self._dataset
        own = [item for item in enumerate(dataset.steps) if not isinstance(item[1], TemplateStep)]
        index, step = [*enumerate(part.pending), *own][-1 - refused.later_steps]
        suffix = f', in a row of {part.stream.hub.dataset_id}' if refused.later_steps >= len(own) else ''
        error = row_error(refused.error, index, step, dataset_id=dataset.dataset_id)
        return InvalidField(error.field, f'{error.problem}{suffix}')


class LibraryStream:
    """Implements `BatchStream`; a thread reads the rows, and a process reads the files of the hub."""

    def __init__(
        self, reader: StreamReader, dataset: Dataset, loader: Loader, meter: RowMeter, *, consumed: int,
        reach_seconds: float = REACH_SECONDS,
    ) -> None:  # fmt: skip
        """Create a stream after `consumed` rows; one call waits up to `reach_seconds` for this position."""
        self._reader, self._dataset, self._loader, self._meter = reader, dataset, loader, meter
        self._consumed, self._reach_seconds = consumed, reach_seconds
        self._reached = 0
        """Number of rows before the batch that is being read; the thread changes it."""
        self._batches = self._read(consumed)
        self._stored: list[StreamedRows] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix='stream')
        self._ahead: asyncio.Future[tuple[list[Row], int] | None] | None = None
        self._is_closed = False

    @property
    def is_failed(self) -> bool:
        ahead = self._ahead
        return ahead is not None and ahead.done() and (ahead.cancelled() or ahead.exception() is not None)

    @property
    def is_reading(self) -> bool:
        return self._ahead is not None and not self._ahead.done()

    @property
    def consumed(self) -> int:
        return self._consumed

    async def next(self) -> tuple[list[Row], int] | None:
        # If the caller is cancelled or refused, the thread continues: reading up to a position may take longer than a
        # call.
        if self._ahead is None:
            self._ahead = asyncio.get_running_loop().run_in_executor(self._executor, next, self._batches, None)
            self._ahead.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._reached < self._consumed:
            done, _ = await asyncio.wait([self._ahead], timeout=self._reach_seconds)
            if not done and self._reached < self._consumed:
                raise PositionNotReached(self._loader.loader_id, self._consumed, self._reached)
        found = await asyncio.shield(self._ahead)
        self._ahead = None
        self._consumed += len(found[0]) if found is not None else 0
        return found

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for rows in self._stored:
            rows.kill()
        self._executor.submit(self._batches.close)
        self._executor.shutdown(wait=False)
        self._meter.close()

    def _read(self, consumed: int) -> Generator[tuple[list[Row], int]]:
        """Yield the batches after `consumed` rows, with their epochs.

        A position is reached by reading batches. If it is not in the first epoch, the first epoch is read completely,
        and its number of rows determines the epoch of the position, because all epochs have the same number.
        """
        with self._reader.opened(self._dataset, self._meter) as (self._stored, rows):
            if self._is_closed:
                # `close` ran before the processes existed, so it did not end them.
                return
            source = StreamedBatches(rows, self._layout(), ReplacementLog(0))
            position, has_rows = Position(), True
            while has_rows and not (self._loader.epoch_count and position.epoch >= self._loader.epoch_count):
                has_rows = False
                for batch, after in source.batches(position):
                    has_rows, position = True, after
                    self._meter.charge(-sum(size_bytes for _, size_bytes in batch), -len(batch))
                    if self._is_reached(consumed, begin=after.consumed - len(batch), end=after.consumed):
                        yield [row for row, _ in batch], after.epoch
                position = source.next_epoch(position)
                if position.epoch == 1 and position.consumed < consumed:
                    position = self._epoch_of(consumed, epoch_rows=position.consumed)

    def _is_reached(self, consumed: int, *, begin: int, end: int) -> bool:
        """Record the rows of a batch, and return whether the batch is after a position."""
        self._reached = end
        if begin < consumed < end:
            raise self._loader.refusal(consumed)
        return begin >= consumed

    def _epoch_of(self, consumed: int, *, epoch_rows: int) -> Position:
        """Return the beginning of the epoch that contains a position."""
        replace(self._loader, row_count=epoch_rows).check_begin(consumed)
        epoch = consumed // epoch_rows
        return Position(epoch * epoch_rows, epoch)

    def _layout(self) -> Layout:
        loader = self._loader
        smallest = loader.batch_size if loader.is_last_partial_dropped else 1
        return Layout(
            batch_size=loader.batch_size,
            min_batch_size=smallest,
            part=RankSlice(),
            seed=loader.shuffle_seed,
            shuffle_buffer=_SHUFFLE_BUFFER,
        )
