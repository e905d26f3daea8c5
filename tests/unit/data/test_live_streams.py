"""Streams of loaders are kept open between calls, within a limit."""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from fixtures.fake_samplers import until
from twinkle_services.data.application.live_streams import LiveStreams
from twinkle_services.data.domain import Cursor, HubSource, HubStream, Loader, Row, StreamMixture, StreamPart
from twinkle_services.data.domain.dataset import new_dataset
from twinkle_services.kit.errors import InvalidField, QueueFull, QuotaExceeded

DATASET = new_dataset('ds-1', tenant_id='alice', create_time=datetime(2026, 1, 1, tzinfo=UTC))
LOADER = Loader(
    loader_id='ld-1', tenant_id='alice', dataset_id='ds-1', content_digest='d', row_count=0, batch_size=2,
    shuffle_seed=None, epoch_count=1, is_last_partial_dropped=False, request_id='r', fingerprint='f', is_streamed=True,
)  # fmt: skip


@dataclass
class Stream:
    """A stream of two rows per batch."""

    consumed: int
    is_failed: bool = False
    is_reading: bool = False
    is_closed: bool = False

    async def next(self) -> tuple[list[Row], int]:
        """Return the next batch."""
        self.consumed += 2
        return [{}, {}], 0

    def close(self) -> None:
        """Record the call."""
        self.is_closed = True


@dataclass
class Engine:
    """Creates streams."""

    streams: list[Stream] = field(default_factory=list[Stream])

    def stream(self, _dataset: Any, _loader: Any, *, consumed: int) -> Stream:
        """Return a stream that starts after some rows."""
        self.streams.append(Stream(consumed))
        return self.streams[-1]


def live(limit: int, *, idle_seconds: float = 60.0) -> tuple[LiveStreams, Engine]:
    """Return the streams of an engine. Two streams of each tenant may be open."""
    engine: Any = Engine()
    return LiveStreams(engine, limit=limit, tenant_limit=2, idle_seconds=idle_seconds), engine


async def read(streams: LiveStreams, consumed: int, loader: Loader = LOADER) -> None:
    """Read one batch after some rows in a call."""
    async with streams.of(DATASET, loader, loader.cursor_at(consumed)) as stream:
        await stream.next()


async def test_a_call_continues_the_stream_of_the_previous_call() -> None:
    """A call at the position of the previous one uses its stream; a call at another position closes it."""
    streams, engine = live(2)
    for consumed in (0, 2, 4):
        await read(streams, consumed)
    assert [stream.consumed for stream in engine.streams] == [6]
    await read(streams, 2)
    assert [stream.is_closed for stream in engine.streams] == [True, False]
    streams.close('ld-1')
    assert engine.streams[1].is_closed


async def test_failed_streams_are_not_used_again() -> None:
    """The next call after an error starts another stream at the same position."""
    streams, engine = live(2)
    async with streams.of(DATASET, LOADER, None) as stream:
        engine.streams[0].is_failed = True
        assert stream.consumed == 0
    await read(streams, 0)
    assert [stream.is_closed for stream in engine.streams] == [True, False]


async def test_the_number_of_streams_is_limited() -> None:
    """Unused streams are closed for new ones, oldest first; if all are in use, a call is refused with a retry time."""
    streams, engine = live(2)
    loaders = [replace(LOADER, loader_id=f'ld-{index}') for index in range(3)]
    for loader in loaders:
        await read(streams, 0, loader)
    assert [stream.is_closed for stream in engine.streams] == [True, False, False]
    async with streams.of(DATASET, loaders[1], loaders[1].cursor_at(2)), streams.of(DATASET, loaders[0], None):
        with pytest.raises(QueueFull):
            await read(streams, 0, loaders[2])
        streams.close_all()
    assert all(stream.is_closed for stream in engine.streams)


async def test_a_stream_of_a_closed_loader_is_closed_after_its_call() -> None:
    """A loader that is closed during a call leaves no open stream."""
    streams, engine = live(2)
    async with streams.of(DATASET, LOADER, None):
        streams.close('ld-1')
        assert not engine.streams[0].is_closed
    assert engine.streams[0].is_closed


async def test_cursors_of_other_content_are_refused() -> None:
    """A cursor of a loader with other content is refused without a stream, and a bare position is accepted."""
    streams, engine = live(1)
    with pytest.raises(InvalidField):
        async with streams.of(DATASET, LOADER, replace(LOADER, content_digest='e').cursor_at(2)):
            pass
    assert engine.streams == []
    async with streams.of(DATASET, LOADER, Cursor(7, b'')) as stream:
        assert stream.consumed == 7


async def test_a_tenant_has_a_share_of_the_streams() -> None:
    """A tenant that uses its share is refused, closes only its own streams for others, and cannot refuse others."""
    streams, engine = live(4)
    own = [replace(LOADER, loader_id=f'ld-{index}') for index in range(3)]
    others = [replace(LOADER, loader_id=f'ld-{name}', tenant_id=name) for name in ('bob', 'carol')]
    for loader in (*others, *own):
        await read(streams, 0, loader)
    assert [stream.is_closed for stream in engine.streams] == [False, False, True, False, False]
    async with AsyncExitStack() as calls:
        for loader in own[:2]:
            await calls.enter_async_context(streams.of(DATASET, loader, None))
        with pytest.raises(QueueFull):
            await read(streams, 0, own[2])
        await read(streams, 2, others[0])


async def test_streams_that_are_being_read_keep_their_progress() -> None:
    """Other tenants cannot close a stream that is read up to its position; its tenant closes other streams first."""
    streams, engine = live(2)
    bob = [replace(LOADER, loader_id=f'ld-{index}', tenant_id='bob') for index in range(3)]
    for loader in bob[:2]:
        await read(streams, 0, loader)
    engine.streams[0].is_reading = True
    await read(streams, 0, LOADER)
    assert [stream.is_closed for stream in engine.streams] == [False, True, False]
    engine.streams[2].is_reading = True
    with pytest.raises(QueueFull):
        await read(streams, 0, replace(LOADER, loader_id='ld-carol', tenant_id='carol'))
    assert [stream.is_closed for stream in engine.streams] == [False, True, False]
    await read(streams, 0, bob[2])
    assert [stream.is_closed for stream in engine.streams] == [True, True, False, False]


async def test_each_part_of_an_interleaved_mixture_counts() -> None:
    """Each part of an interleaved mixture counts as a stream; a mixture above a tenant's share is always refused."""
    streams, engine = live(4)
    part = StreamPart(stream=HubStream(hub=HubSource(dataset_id='d'), revision='', columns=()))
    two, three = (replace(DATASET, stream=StreamMixture(parts=(part,) * n, is_interleaved=True)) for n in (2, 3))
    loaders = [replace(LOADER, loader_id=f'ld-{index}') for index in range(3)]
    await read(streams, 0, loaders[0])
    async with streams.of(two, loaders[1], None):
        assert [stream.is_closed for stream in engine.streams] == [True, False]
        with pytest.raises(QueueFull):
            await read(streams, 0, loaders[2])
    await read(streams, 0, loaders[2])
    assert [stream.is_closed for stream in engine.streams] == [True, True, False]
    with pytest.raises(QuotaExceeded):
        async with streams.of(three, loaders[1], None):
            pass


async def test_a_refused_call_closes_no_stream() -> None:
    """A mixture that does not fit beside the streams of other tenants is refused, and their streams stay open."""
    streams, engine = live(3)
    part = StreamPart(stream=HubStream(hub=HubSource(dataset_id='d'), revision='', columns=()))
    two = replace(DATASET, stream=StreamMixture(parts=(part, part), is_interleaved=True))
    bob, carol = (replace(LOADER, loader_id=f'ld-{name}', tenant_id=name) for name in ('bob', 'carol'))
    await read(streams, 0, bob)
    async with streams.of(two, carol, None):
        with pytest.raises(QueueFull):
            async with streams.of(two, LOADER, None):
                pass
    assert [stream.is_closed for stream in engine.streams] == [False, False]


async def test_streams_of_closed_loaders_are_not_kept() -> None:
    """A stream whose loader is closed during a call is closed at the end of the call."""
    streams, engine = live(2)
    async with streams.of(DATASET, LOADER, None):
        streams.close('ld-1')
        assert not engine.streams[0].is_closed
    assert engine.streams[0].is_closed
    await read(streams, 0)
    assert not engine.streams[1].is_closed


async def test_streams_without_calls_are_closed_after_some_time() -> None:
    """A stream that no call uses is closed, and a later call starts another one."""
    streams, engine = live(2, idle_seconds=0.01)
    await read(streams, 0)
    await until(lambda: engine.streams[0].is_closed)
    await read(streams, 2)
    assert [stream.consumed for stream in engine.streams] == [2, 4]
