"""Positions of streamed datasets are reached in at most two passes, and wrong ones are refused."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from twinkle.dataset import DatasetError
from twinkle_services.data.backends.hub_rows import HubAccess, StreamedRows
from twinkle_services.data.backends.streamed import LibraryStream
from twinkle_services.data.domain import (
    Cursor,
    DecodedBytes,
    DecodedLimits,
    HubSource,
    HubStream,
    Loader,
    PositionNotReached,
    Row,
    RowMeter,
)
from twinkle_services.data.domain.dataset import new_dataset
from twinkle_services.kit.errors import InvalidField

DATASET = new_dataset('ds-1', tenant_id='alice', create_time=datetime(2026, 1, 1, tzinfo=UTC))
ROWS = 5
LOADER = Loader(
    loader_id='ld-1', tenant_id='alice', dataset_id='ds-1', content_digest='d', row_count=0, batch_size=2,
    shuffle_seed=3, epoch_count=0, is_last_partial_dropped=False, request_id='r', fingerprint='f', is_streamed=True,
)  # fmt: skip


@dataclass
class Reader:
    """Reads five rows in each pass."""

    pass_count: int = 0
    row_count: int = ROWS
    gate: threading.Event = field(default_factory=threading.Event)
    """Must be set before the fourth row is read."""

    @contextmanager
    def opened(self, _dataset: Any, meter: RowMeter) -> Iterator[tuple[list[Any], 'Reader']]:
        """Return the processes that read rows, an empty list, and the rows."""
        self._meter = meter
        yield [], self

    def __iter__(self) -> Iterator[tuple[Row, int]]:
        self.pass_count += 1
        for index in range(self.row_count):
            if index == 3:
                self.gate.wait()
            self._meter.charge(1, 1)
            yield {'index': index}, 1


def stream_of(reader: Any, loader: Loader, consumed: int, *, is_open: bool = True) -> LibraryStream:
    """Return a stream at a position; unless `is_open`, calls wait at most 0.05 seconds for the rows before it."""
    if is_open:
        reader.gate.set()
    limits = DecodedLimits(rows=100, dataset_bytes=100, tenant_bytes=100, total_bytes=100)
    meter = RowMeter(DecodedBytes(limits), 'alice')
    return LibraryStream(reader, DATASET, loader, meter, consumed=consumed, reach_seconds=0.05 if not is_open else 60.0)


async def first_batches(loader: Loader, consumed: int, count: int = 3) -> tuple[list[Any], int]:
    """Return some batches after a position, and the number of passes over the rows."""
    reader = Reader()
    stream = stream_of(reader, loader, consumed)
    try:
        return [await stream.next() for _ in range(count)], reader.pass_count
    finally:
        stream.close()


@pytest.mark.parametrize('loader', [LOADER, replace(LOADER, is_last_partial_dropped=True)], ids=['partial', 'full'])
async def test_every_position_continues_exactly(loader: Loader) -> None:
    """The batches after any position are those of a stream from the beginning, in the order of their epochs."""
    whole, _ = await first_batches(loader, 0, count=12)
    consumed = 0
    for index, (rows, _) in enumerate(whole[:-3]):
        assert (await first_batches(loader, consumed))[0] == whole[index : index + 3]
        consumed += len(rows)


async def test_a_distant_position_needs_two_passes() -> None:
    """A position after 10 billion epochs is reached with one complete pass, and the pass in which it is."""
    [(rows, epoch), *_], pass_count = await first_batches(LOADER, 10_000_000_000 * ROWS + 2, count=1)
    assert (len(rows), epoch, pass_count) == (2, 10_000_000_000, 2)


@pytest.mark.parametrize(('consumed', 'epoch_count'), [(1, 0), (6, 0), (10_000_000_000 * ROWS + 1, 0), (11, 2)])
async def test_wrong_positions_are_refused(consumed: int, epoch_count: int) -> None:
    """A position inside of a batch, or beyond the last epoch, is refused with the name of its field."""
    with pytest.raises(InvalidField) as refusal:
        await first_batches(replace(LOADER, epoch_count=epoch_count), consumed)
    assert refusal.value.field == 'start.cursor.consumed_rows'


async def test_positions_of_an_empty_dataset_are_refused() -> None:
    """A dataset whose steps remove all rows has no position except the beginning."""
    for consumed, is_refused in ((0, False), (2, True)):
        stream = stream_of(Reader(row_count=0), LOADER, consumed)
        if is_refused:
            with pytest.raises(InvalidField):
                await stream.next()
        else:
            assert await stream.next() is None
        stream.close()


async def test_the_end_is_a_position() -> None:
    """A stream after the last row of its last epoch has no batches."""
    stream = stream_of(Reader(), replace(LOADER, epoch_count=2), 2 * ROWS)
    assert await stream.next() is None
    stream.close()


def test_positions_inside_of_full_batches_are_refused_without_reading() -> None:
    """If all batches are full, a cursor must be a multiple of their size."""
    loader = replace(LOADER, is_last_partial_dropped=True)
    assert loader.rows_before(Cursor(4, b'')) == 4
    with pytest.raises(InvalidField) as refusal:
        loader.rows_before(Cursor(5, b''))
    assert refusal.value.field == 'start.cursor.consumed_rows'


async def progress_of(stream: LibraryStream) -> PositionNotReached:
    """Return the refusal of a call that does not reach its position."""
    with pytest.raises(PositionNotReached) as refusal:
        await stream.next()
    return refusal.value


async def test_calls_report_progress_and_continue() -> None:
    """A call that does not reach its position fails with the progress, and a later call continues to read."""
    reader = Reader()
    stream = stream_of(reader, replace(LOADER, shuffle_seed=None), 4, is_open=False)
    found = await progress_of(stream)
    while found.reached_rows < 2:  # the timeout of the test limits the time in which the thread reads these rows
        found = await progress_of(stream)
    assert not stream.is_failed
    assert (found.loader_id, found.consumed_rows, found.reached_rows) == ('ld-1', 4, 2)
    reader.gate.set()
    batch = await stream.next()
    assert batch is not None
    assert (len(batch[0]), stream.consumed, reader.pass_count) == (1, 5, 1)
    stream.close()


class SlowReader(Reader):
    """Takes time until rows can be read, as if it loads a template."""

    is_opening = threading.Event()

    @contextmanager
    def opened(self, dataset: Any, meter: RowMeter) -> Iterator[tuple[list[Any], Reader]]:
        """Wait for the gate, and return the rows."""
        self.is_opening.set()
        self.gate.wait()
        with super().opened(dataset, meter) as found:
            yield found


async def test_a_stream_that_is_closed_while_it_opens_reads_nothing() -> None:
    """No rows are read for a distant position of a stream that was closed before its processes started."""
    reader = SlowReader()
    stream = stream_of(reader, LOADER, 1_000_000, is_open=False)
    with pytest.raises(PositionNotReached):
        await stream.next()
    assert reader.is_opening.is_set()
    stream.close()
    reader.gate.set()
    assert await stream.next() is None
    assert reader.pass_count == 0


def test_a_process_that_starts_while_its_stream_closes_is_ended(tmp_path: Path) -> None:
    """Rows that are closed while their process starts are not read."""

    class Access(HubAccess):
        """Closes the rows during the start of their process."""

        def is_private_allowed(self, dataset_id: str) -> bool:
            rows.kill()
            return super().is_private_allowed(dataset_id)

    (tmp_path / 'train.jsonl').write_text('{"x": 1}\n')
    limits = DecodedLimits(rows=9, dataset_bytes=9999, tenant_bytes=9999, total_bytes=9999)
    stream = HubStream(hub=HubSource(dataset_id=str(tmp_path)), revision='', columns=('x',))
    meter = RowMeter(DecodedBytes(limits), 'alice')
    rows = StreamedRows(stream, meter, access=Access((tmp_path.resolve(),)), memory_bytes=1 << 30, read_ahead=1)
    with pytest.raises(DatasetError, match='the process that reads it ended'):
        next(iter(rows))
