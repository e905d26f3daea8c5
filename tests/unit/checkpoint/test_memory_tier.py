"""The memory tier: its capacity, the versions of a killed process, and the removal of abandoned segments."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import make_state
from fixtures.memory_host import (
    ADAPTER,
    STATE_BYTES,
    GatedStore,
    Host,
    mapped_count,
    put,
    read,
    record_of,
    release,
    spilling,
    until_durable,
)
from twinkle.checkpoint_engine import iter_chunks
from twinkle_services.checkpoint.backends.memory_tier import MemoryTier
from twinkle_services.checkpoint.backends.segment_cache import SegmentCache
from twinkle_services.checkpoint.domain import VersionKey
from twinkle_services.kit.errors import DigestMismatch, InUse, InvalidField, MemoryNotShared, VersionNotFound
from twinkle_services.kit.weights import SegmentRef, Segments
from twinkle_services.kit.worker import Threads


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Pool of two threads."""
    threads = Threads('store', count=2)
    yield threads
    threads.close()


@pytest.fixture
async def host(tmp_path: Path, threads: Threads) -> Host:
    """A host without versions."""
    return Host(tmp_path, threads, GatedStore(threads))


async def test_versions_are_served_from_memory_before_they_are_durable(host: Host) -> None:
    """A version can be opened, with its segment, before the version is in the durable store."""
    tier = host.tier()
    await put(tier, 1)
    assert await host.durable.load() == []
    source = await tier.open_state(VersionKey(ADAPTER, 1), is_adapter_only=True)
    assert source.segment is not None
    segment = Segments(host.folder / 'memory').adopt(source.segment)
    assert bytes(segment.data) == make_state(1).data
    await source.close()


async def test_pinned_versions_are_durable_when_the_call_returns(host: Host) -> None:
    """A call that publishes a pinned version or pins a version returns only once the durable store has the version."""
    tier = host.tier()
    records = [await put(tier, 1, is_pinned=True), replace(await put(tier, 2), is_pinned=True)]
    await tier.update(records[1])
    assert await host.durable.load() == records


async def test_published_version_survives_its_process(host: Host) -> None:
    """The next process finds a published version in shared memory, and spills it to the durable store."""
    record = await put(first := host.tier(), 1)
    writer = first.begin(VersionKey(ADAPTER, 2), make_state(2).manifest)
    await writer.add(next(iter_chunks(make_state(2).data, chunk_bytes=1000)))
    assert len(host.segments()) == 2
    release(first)
    tier = host.tier()
    assert await tier.load() == [record]
    assert len(host.segments()) == 1
    assert await read(tier, 1) == make_state(1).data
    async with spilling(tier):
        await until_durable(host, 1)
    assert await host.durable.load() == [record]
    assert await read(host.durable, 1) == make_state(1).data


async def test_deleted_versions_take_no_memory_while_the_disk_hangs(host: Host) -> None:
    """Deleted versions are unmapped even while the disk does not accept an earlier version."""
    tier = host.tier()
    host.durable.gate.clear()
    async with spilling(tier):
        await put(tier, 1)
        for number in range(2, 20):
            await put(tier, number)
            await tier.delete(VersionKey(ADAPTER, number))
        gc.collect()
    assert mapped_count(host) == 1


async def test_spill_waits_for_a_quiet_period(host: Host) -> None:
    """An unpinned version is not spilled while versions are read."""
    tier = host.tier(quiet_seconds=1000, patience_seconds=1000)
    record = await put(tier, 1)
    async with spilling(tier):
        for _ in range(100):
            await read(tier, 1)
        assert await host.durable.load() == []
        await tier.update(replace(record, is_pinned=True))
        assert len(await host.durable.load()) == 1


@pytest.mark.parametrize('reason', [{'patience_seconds': 0}, {'count': 1}, {'quiet_seconds': 0}])
async def test_wait_for_a_quiet_period_is_limited(host: Host, reason: dict[str, Any]) -> None:
    """A version is spilled after `patience_seconds`, when memory is short, or after `quiet_seconds` without use."""
    tier = host.tier(**({'quiet_seconds': 1000, 'patience_seconds': 1000} | reason))
    async with spilling(tier):
        await put(tier, 1)
        await until_durable(host, 1)


async def test_update_after_a_deletion_fails(host: Host) -> None:
    """An update that waits for a deletion fails and does not create the record again."""
    tier = host.tier()
    record = await put(tier, 1)
    source = await tier.open_state(VersionKey(ADAPTER, 1), is_adapter_only=True)
    deleting = asyncio.create_task(tier.delete(VersionKey(ADAPTER, 1)))
    await asyncio.sleep(0)
    changing = asyncio.create_task(tier.update(replace(record, is_pinned=True)))
    await deleting
    with pytest.raises(VersionNotFound):
        await changing
    release(tier)
    assert await host.tier().load() == []
    await source.close()


async def test_least_recently_used_version_is_removed_from_memory(host: Host) -> None:
    """The least recently used version is removed from memory, and later reads come from the durable store."""
    tier = host.tier(count=3)
    async with spilling(tier):
        for number in (1, 2, 3):
            await put(tier, number)
        await until_durable(host, 3)
        await read(tier, 1)
        await put(tier, 4)
    in_memory = [number for number in (1, 2, 3, 4) if (await _segment(tier, number)) is not None]
    assert in_memory == [1, 3, 4]
    assert tier.used_bytes == 3 * STATE_BYTES
    assert [await read(tier, number) == make_state(number).data for number in (1, 2, 3, 4)] == [True] * 4


async def test_slow_disk_delays_publishers_and_loses_nothing(host: Host) -> None:
    """Publishing waits for the disk while memory is full of unspilled versions, and no version is lost."""
    host.durable.gate.clear()
    tier = host.tier(count=2)
    async with spilling(tier):
        await put(tier, 1)
        await put(tier, 2)
        third = asyncio.create_task(put(tier, 3))
        await asyncio.wait([third], timeout=0.05)
        assert not third.done()
        assert tier.used_bytes == 2 * STATE_BYTES
        host.durable.gate.set()
        await third
    assert [await read(tier, number) == make_state(number).data for number in (1, 2, 3)] == [True] * 3


async def test_failed_spill_is_retried(host: Host) -> None:
    """A version whose spill failed is served from memory, and its spill is retried."""
    host.durable.refusals = 1
    tier = host.tier()
    record = await put(tier, 1)
    async with spilling(tier):
        assert await read(tier, 1) == make_state(1).data
        await until_durable(host, 1)
    assert await host.durable.load() == [record]


async def test_a_deleted_version_never_reaches_the_disk(host: Host) -> None:
    """A version deleted during its spill is not in the durable store. Its segment exists until its reader closes."""
    host.durable.gate.clear()
    tier = host.tier()
    await put(tier, 1)
    source = await tier.open_state(VersionKey(ADAPTER, 1), is_adapter_only=True)
    async with spilling(tier):
        await asyncio.sleep(0)
        deleting = asyncio.create_task(tier.delete(VersionKey(ADAPTER, 1)))
        await asyncio.sleep(0)
        host.durable.gate.set()
        await deleting
    with pytest.raises(VersionNotFound):
        await tier.open_state(VersionKey(ADAPTER, 1), is_adapter_only=True)
    assert await host.durable.load() == []
    assert bytes(await source.read(0, source.size_bytes)) == make_state(1).data
    assert len(host.segments()) == 1
    await source.close()
    assert host.segments() == []
    assert tier.used_bytes == 0


async def test_a_publishers_segment_is_adopted(host: Host) -> None:
    """An adopted segment is verified, and remains after its publisher removes its name."""
    tier, publisher = host.tier(), Segments(host.folder / 'memory')
    segment = publisher.create(STATE_BYTES)
    segment.data[:] = make_state(1).data
    writer = tier.begin(VersionKey(ADAPTER, 1), make_state(1).manifest)
    await writer.adopt(segment.ref)
    segment.remove()
    await writer.commit(record_of(make_state(1), 1))
    assert await read(tier, 1) == make_state(1).data

    invalid_segment = publisher.create(STATE_BYTES)
    writer = tier.begin(VersionKey(ADAPTER, 2), make_state(2).manifest)
    await writer.adopt(invalid_segment.ref)
    with pytest.raises(DigestMismatch):
        await writer.commit(record_of(make_state(2), 2))
    await writer.discard()
    assert tier.used_bytes == STATE_BYTES
    assert len(host.segments()) == 1


async def test_segment_is_copied_if_memory_is_full(host: Host) -> None:
    """If memory is full, an adopted segment is copied to the durable store; an invalid reference is refused."""
    tier, publisher = host.tier(count=0), Segments(host.folder / 'memory')
    segment = publisher.create(STATE_BYTES)
    segment.data[:] = make_state(1).data
    writer = tier.begin(VersionKey(ADAPTER, 1), make_state(1).manifest)
    await writer.adopt(segment.ref)
    await writer.commit(record_of(make_state(1), 1))
    assert await read(host.durable, 1) == make_state(1).data
    for ref, error in (
        (replace(segment.ref, size_bytes=1), InvalidField),
        (SegmentRef('0' * 32, segment.ref.name, STATE_BYTES), MemoryNotShared),
        (replace(segment.ref, name='keep.nothing'), MemoryNotShared),
    ):
        writer = tier.begin(VersionKey(ADAPTER, 2), make_state(2).manifest)
        with pytest.raises(error):
            await writer.adopt(ref)
        await writer.discard()


@pytest.mark.parametrize('is_adopted', [False, True])
async def test_cancelled_publish_leaves_no_segment(host: Host, *, is_adopted: bool) -> None:
    """A publish that is cancelled while its segment is created or opened leaves no segment and no reservation."""
    tier, publisher = host.tier(), Segments(host.folder / 'memory')
    segment = publisher.create(STATE_BYTES)
    for _ in range(20):
        writer = tier.begin(VersionKey(ADAPTER, 1), make_state(1).manifest)
        first = writer.adopt(segment.ref) if is_adopted else writer.add(next(iter_chunks(make_state(1).data)))
        publishing = asyncio.create_task(first)
        await asyncio.sleep(0)
        publishing.cancel()
        await asyncio.wait([publishing])
        await writer.discard()
    assert host.segments() == []
    assert tier.used_bytes == 0


async def test_flush_leaves_no_segment_in_memory(host: Host) -> None:
    """All versions are durable and no segment is left after `flush`."""
    tier = host.tier()
    records = [await put(tier, number) for number in (1, 2)]
    await tier.flush()
    release(tier)
    assert await host.durable.load() == records
    assert host.segments() == []
    assert [path.name for path in (host.folder / 'memory').glob('checkpoint.*')] == []


async def test_segments_of_a_removed_store_are_deleted(host: Host, tmp_path: Path) -> None:
    """The next service deletes the segments of a store whose folder was removed, and keeps those of a stopped store."""
    removed, stopped = tmp_path / 'gone', tmp_path / 'stopped'
    segments = Segments(host.folder / 'memory')
    for home in (removed, stopped):
        home.mkdir()
        cache = SegmentCache(segments, store_url=str(home), home=home)
        await put(MemoryTier(host.durable, cache, host.threads, capacity_bytes=STATE_BYTES), 1)
        cache.close()
    removed.rmdir()
    assert len(host.segments()) == 2
    host.tier()
    assert len(host.segments()) == 1
    assert len((SegmentCache(segments, store_url=str(stopped), home=stopped)).load()) == 1


async def test_memory_of_a_store_is_used_by_one_process(host: Host) -> None:
    """A second process cannot open shared memory that a store uses."""
    tier = host.tier()
    with pytest.raises(InUse):
        host.tier()
    release(tier)
    host.tier()


async def _segment(tier: MemoryTier, number: int) -> SegmentRef | None:
    with suppress(VersionNotFound):
        source = await tier.open_state(VersionKey(ADAPTER, number), is_adapter_only=True)
        await source.close()
        return source.segment
    return None
