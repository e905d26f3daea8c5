"""Evicted versions are deleted in the background, and a restart finds the remaining ones."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from fixtures.checkpoint_service import make_state
from twinkle.checkpoint_engine import iter_chunks
from twinkle_services.checkpoint.application.evictions import Evictions
from twinkle_services.checkpoint.application.registry import Registry
from twinkle_services.checkpoint.application.versions import Versions
from twinkle_services.checkpoint.backends.memory_store import MemoryStore
from twinkle_services.checkpoint.domain import (
    AdapterKey,
    AdapterVersion,
    Catalogue,
    CheckpointKey,
    NewestMark,
    VersionKey,
)
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.worker import Threads

ADAPTER = AdapterKey('alice', 'ad-1')
ALICE = Caller(tenant_id='alice', is_internal=True)


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Pool of one thread."""
    threads = Threads('store', count=1)
    yield threads
    threads.close()


class BrokenStore(MemoryStore):
    """A store that fails to delete version 1 while `is_broken` is set."""

    is_broken = True

    async def delete(self, key: VersionKey | CheckpointKey) -> None:
        """Delete the state, or fail for version 1."""
        if self.is_broken and isinstance(key, VersionKey) and key.version == 1:
            raise OSError('the disk failed')
        await super().delete(key)


async def put(store: MemoryStore, number: int) -> AdapterVersion:
    state = make_state(number)
    record = AdapterVersion(
        adapter=ADAPTER,
        version=number,
        digest=state.manifest.digest,
        size_bytes=state.manifest.size_bytes,
        is_pinned=False,
        create_time=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
    )
    writer = store.begin(record.key, state.manifest)
    for chunk in iter_chunks(state.data):
        await writer.add(chunk)
    await writer.commit(record)
    return record


async def test_failed_deletion_does_not_block_others(threads: Threads) -> None:
    """A failed deletion does not affect other deletions, and `add` does not wait for deletions."""
    store = BrokenStore(threads)
    records = [await put(store, number) for number in (1, 2, 3)]
    Evictions(store).add(records[:2])
    assert len(await store.load()) == 3
    while len(await store.load()) > 2:  # noqa: ASYNC110 (a store has no event to wait for; the test's timeout bounds it)
        await asyncio.sleep(0)
    assert await store.load() == [records[0], records[2]]


async def test_the_next_start_deletes_versions_beyond_the_ring(threads: Threads) -> None:
    """The next `restore` returns versions that an exited process has not deleted."""
    store = MemoryStore(threads)
    records = [await put(store, number) for number in (1, 2, 3)]
    catalogue = Catalogue(ring_capacity=2, pin_limit=1)
    assert catalogue.restore(await store.load()) == records[:1]
    assert [version.version for version in catalogue.ring(ADAPTER).all_newest_first()] == [3, 2]


async def _registry(store: MemoryStore) -> Registry:
    catalogue = Catalogue(ring_capacity=2, pin_limit=1)
    catalogue.restore(await store.load())
    return Registry(catalogue, store, FakeClock())


async def test_unpinning_succeeds_although_the_evicted_version_remains(threads: Threads) -> None:
    """Unpinning a version succeeds even if the version that it evicts cannot be deleted."""
    store = BrokenStore(threads)
    records = [await put(store, number) for number in (1, 2, 3)]
    await store.update(replace(records[2], is_pinned=True))
    versions = Versions(await _registry(store))
    assert await versions.pin(ALICE, 'ad-1', 3, is_pinned=False) == records[2]
    assert (await store.load())[2] == records[2]


async def test_refused_deletion_of_all_versions_keeps_the_others(threads: Threads) -> None:
    """Versions that remain after a failed `delete_all` can still be found, and the next call deletes them."""
    store = BrokenStore(threads)
    records = [await put(store, number) for number in (1, 2)]
    registry = await _registry(store)
    versions = Versions(registry)
    with pytest.raises(OSError, match='the disk failed'):
        await versions.delete_all(ALICE, 'ad-1')
    assert registry.catalogue.ring(ADAPTER).all_newest_first() == records[::-1]
    store.is_broken = False
    await versions.delete_all(ALICE, 'ad-1')
    assert registry.catalogue.adapters() == []
    assert await store.load() == [NewestMark(ADAPTER, 2)]
