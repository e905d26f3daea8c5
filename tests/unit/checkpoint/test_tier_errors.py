"""A disk or shared-memory error at every step of a change of a version in memory.

After a failed change, the tier and a restarted tier must have the old version; after a successful one, the new version.
"""

import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.checkpoint_service import make_state
from fixtures.failing_disk import ChangeCounter, CrashingDisk
from fixtures.memory_host import ADAPTER, STATE_BYTES, put, read, record_of, release
from twinkle.checkpoint_engine import iter_chunks
from twinkle_services.checkpoint.backends.folder_store import FolderStore
from twinkle_services.checkpoint.backends.memory_tier import MemoryTier
from twinkle_services.checkpoint.backends.segment_cache import CachedVersion, SegmentCache
from twinkle_services.checkpoint.domain import AdapterVersion, VersionKey
from twinkle_services.kit.errors import DomainError, VersionNotFound
from twinkle_services.kit.weights import Segments
from twinkle_services.kit.worker import Threads

KEY = VersionKey(ADAPTER, 1)
OLD = record_of(make_state(1), 1)
PINNED = replace(OLD, is_pinned=True)


class FailingCache(SegmentCache):
    """Shared memory that fails at one of its changes."""

    def __init__(self, folder: Path, counter: ChangeCounter) -> None:
        super().__init__(Segments(folder / 'memory'), store_url='here', home=folder)
        self._counter = counter

    def put(self, cached: CachedVersion) -> None:
        """Write a record, or fail."""
        self._counter.begin_change()
        super().put(cached)

    def remove_record(self, name: str) -> None:
        """Remove a record, or fail."""
        self._counter.begin_change()
        super().remove_record(name)


def _tier(folder: Path, threads: Threads, counter: ChangeCounter | None = None) -> MemoryTier:
    counter = counter or ChangeCounter()
    durable = FolderStore(CrashingDisk(str(folder / 'disk'), counter), threads)
    return MemoryTier(durable, FailingCache(folder, counter), threads, capacity_bytes=100 * STATE_BYTES)


async def _put_pinned(tier: MemoryTier) -> None:
    state = make_state(1)
    writer = tier.begin(KEY, state.manifest)
    try:
        for chunk in iter_chunks(state.data, chunk_bytes=1000):
            await writer.add(chunk)
        await writer.commit(PINNED)
    finally:
        await writer.discard()


Change = Callable[[MemoryTier], Awaitable[object]]
CHANGES: dict[str, tuple[AdapterVersion | None, Change, AdapterVersion | None]] = {
    'publish pinned': (None, _put_pinned, PINNED),
    'pin': (OLD, lambda tier: tier.update(PINNED), PINNED),
    'unpin': (PINNED, lambda tier: tier.update(OLD), OLD),
    'delete': (OLD, lambda tier: tier.delete(KEY), None),
    'delete spilled': (PINNED, lambda tier: tier.delete(KEY), None),
}
"""Version before a change, the change, and the version after it. A pinned version is also on disk."""


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize('name', CHANGES)
async def test_an_error_at_any_step_leaves_the_old_or_the_new_version(tmp_path: Path, name: str, number: int) -> None:
    """A failed change leaves the old version in memory and after a restart; a successful one leaves the new version."""
    old, change, new = CHANGES[name]
    threads = Threads('store', count=1)
    counter, step = ChangeCounter(), -1
    while step < 0 or counter.remaining < 0:
        step += 1
        folder, counter = tmp_path / str(step), ChangeCounter()
        folder.mkdir()
        tier = _tier(folder, threads, counter)
        if old is not None:
            await put(tier, 1, is_pinned=old.is_pinned)
        counter.remaining, counter.error_number = step, number
        expected = new if await _succeeds(change(tier)) else old
        counter.error_number = 0
        assert await _has_version(tier) == (expected is not None), f'error at change {step}'
        release(tier)
        restarted = _tier(folder, threads)
        assert await restarted.load() == ([] if expected is None else [expected]), f'error at change {step}'
        assert await _has_version(restarted) == (expected is not None)
        release(restarted)
    threads.close()
    assert step > 0


async def _succeeds(change: Awaitable[object]) -> bool:
    try:
        await change
    except (OSError, DomainError):
        return False
    return True


async def _has_version(tier: MemoryTier) -> bool:
    """Return whether the tier has the version, and check its bytes."""
    try:
        data = await read(tier, 1)
    except VersionNotFound:
        return False
    assert data == make_state(1).data
    return True
