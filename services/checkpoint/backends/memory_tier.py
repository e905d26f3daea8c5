"""A store that keeps versions in shared memory and writes them to a durable store in the background.

Publishing a version returns once its segment and record are in shared memory, which survives a crash of the process.
The version is written to the durable store ("spilled") after a short pause, in which subscribers can fetch it, and
stays in memory until its memory is needed. Checkpoints, pinned versions, and versions that do not fit in memory are
written to the durable store before publishing returns. Publishing them is therefore as slow as the disk.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

import structlog

from twinkle.checkpoint_engine import WeightManifest, iter_chunks
from twinkle_services.checkpoint.backends.folder_writer import is_durable
from twinkle_services.checkpoint.backends.segment_cache import CachedVersion, SegmentCache
from twinkle_services.checkpoint.backends.tier_writer import TierWriter
from twinkle_services.checkpoint.domain import (
    AdapterVersion,
    Checkpoint,
    CheckpointKey,
    DamagedState,
    NewestMark,
    Record,
    VersionKey,
)
from twinkle_services.checkpoint.ports import ByteSource, StateSource, StateStore
from twinkle_services.kit import failpoints
from twinkle_services.kit.errors import DomainError, StoreUnavailable
from twinkle_services.kit.weights import BytesInMemory
from twinkle_services.kit.worker import Threads

_log = structlog.get_logger('memory')

_Key = VersionKey | CheckpointKey
_FIRST_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 30.0
_QUIET_SECONDS = 0.25
_PATIENCE_SECONDS = 1.0
_MAX_VERSIONS = 4096
"""Maximum number of versions in memory; the system limits the number of mappings of a process."""


@dataclass(eq=False)
class _Entry:
    """A version in memory."""

    cached: CachedVersion
    is_spilled: bool = False
    is_removed: bool = False
    """Whether the removal of the version from memory has begun; open readers can still read the version."""
    reader_count: int = 0
    arrival_seconds: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """Time at which the version arrived, on the event loop's clock."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while this version is changed in the durable store."""

    @property
    def size_bytes(self) -> int:
        """Memory that the version occupies."""
        return self.cached.manifest.size_bytes


class MemoryTier:
    """Implements `StateStore` over shared memory and a durable store.

    Concurrency: use it from one event loop only. Versions are spilled in the background only while `run` is running.
    """

    def __init__(
        self,
        durable: StateStore,
        cache: SegmentCache,
        threads: Threads,
        *,
        capacity_bytes: int,
        quiet_seconds: float = _QUIET_SECONDS,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        """Create a tier; `load` restores the versions in shared memory.

        Args:
            durable: The durable store.
            cache: Segments and their records.
            threads: Threads that access files.
            capacity_bytes: Maximum memory that versions occupy.
            quiet_seconds: Versions are spilled once no version has been written, opened or closed for this time,
                because spilling slows down publishers and subscribers.
            patience_seconds: Maximum time that a version waits for `quiet_seconds` to pass before it is spilled.
        """
        self._quiet_seconds = quiet_seconds
        self._patience_seconds = patience_seconds
        self._last_use = float('-inf')
        self._durable = durable
        self._cache = cache
        self._threads = threads
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._entries: dict[_Key, _Entry] = {}
        """Versions in memory, least recently used first."""
        self._to_spill: asyncio.Queue[_Key] = asyncio.Queue()
        """Versions to spill, as keys only, so that the queue does not keep a deleted version in memory."""

    @property
    def used_bytes(self) -> int:
        """Memory in use in bytes, including the memory that is reserved for states being written."""
        return self._used_bytes

    async def load(self) -> list[Record | NewestMark | DamagedState]:
        """Load the durable store and the shared memory; versions that are only in memory are queued to be spilled."""
        found = await self._durable.load()
        durable = {item.key: item for item in found if isinstance(item, AdapterVersion | Checkpoint)}
        for cached in sorted(await self._threads.run(self._cache.load), key=_create_time):
            await self._restore(cached, durable.get(cached.record.key))
        records = durable | {key: entry.cached.record for key, entry in self._entries.items()}
        marks = [item for item in found if isinstance(item, NewestMark)]
        damaged = [item for item in found if isinstance(item, DamagedState) and item.key not in records]
        return [*records.values(), *marks, *damaged]

    async def run(self) -> None:
        """Write versions to the durable store one after the other until cancelled."""
        while True:
            await self._spill_next(await self._to_spill.get())

    async def flush(self) -> None:
        """Write all versions to the durable store and free their memory; `run` must have finished.

        A version that cannot be written stays in shared memory for the next process.
        """
        for entry in list(self._entries.values()):
            try:
                await self._spill(entry)
                await self._threads.run(self._cache.remove, entry.cached.name)
            except (OSError, DomainError) as error:
                _log.error('version not spilled', key=str(entry.cached.record.key), error=str(error))

    def begin(self, key: _Key, manifest: WeightManifest) -> TierWriter:
        """Return a writer, which chooses between memory and the durable store at its first call."""
        durable = self._durable.begin(key, manifest)
        return TierWriter(self, durable, key, manifest, cache=self._cache, threads=self._threads)

    async def open_state(self, key: _Key, *, is_adapter_only: bool) -> StateSource:
        entry = self._entries.get(key)
        if entry is None:
            return await self._durable.open_state(key, is_adapter_only=is_adapter_only)
        self._entries[key] = self._entries.pop(key)
        entry.reader_count += 1
        self._touch()
        return _MemorySource(self, entry)

    async def open_archive(self, checkpoint: Checkpoint) -> ByteSource:
        return await self._durable.open_archive(checkpoint)

    async def update(self, record: Record) -> None:
        """Replace the record of a committed state; a version that becomes pinned is spilled first."""
        while (entry := self._entries.get(record.key)) is not None:
            async with entry.lock:
                if await self._update(entry, record):
                    return
            # The version was deleted or replaced while this call waited, or is being removed from memory.
            await asyncio.sleep(0)
        await self._durable.update(record)

    async def _update(self, entry: _Entry, record: Record) -> bool:
        """Replace the record of a version in memory; return False if the version was removed."""
        if is_durable(record):
            await self._write_through(entry)
        if entry.is_removed:
            return False
        changed = replace(entry.cached, record=record)
        if entry.is_spilled:
            # `load` prefers the durable record, so the change counts even if the record in memory cannot be written.
            await self._durable.update(record)
            entry.cached = changed
        try:
            await self._threads.run(self._cache.put, changed)
        except (OSError, StoreUnavailable) as error:
            if not entry.is_spilled:
                raise
            _log.error('record in shared memory not updated', key=str(record.key), error=str(error))
        entry.cached = changed
        return True

    async def mark_newest(self, mark: NewestMark) -> None:
        await self._durable.mark_newest(mark)

    async def delete(self, key: _Key) -> None:
        entry = self._entries.get(key)
        if entry is None:
            await self._durable.delete(key)
            return
        # Set before waiting for the lock, so that a spill in progress stops early.
        entry.is_removed = True
        async with entry.lock:
            try:
                await self._durable.delete(key)
                entry.is_spilled = False
                await self._threads.run(self._cache.remove_record, entry.cached.name)
            except BaseException:
                # The version remains in memory. It is queued again, because a running spill may have stopped early.
                entry.is_removed = False
                if not entry.is_spilled:
                    self._to_spill.put_nowait(key)
                raise
            await self._drop(entry)

    async def reserve(self, size_bytes: int) -> bool:
        """Reserve memory for a state, removing spilled versions if necessary; return whether there was enough."""
        self._touch()
        evicted = list(self._evictable(size_bytes))
        used_bytes = self._used_bytes - sum(entry.size_bytes for entry in evicted)
        if used_bytes + size_bytes > self._capacity_bytes or len(self._entries) - len(evicted) >= _MAX_VERSIONS:
            return False
        self._used_bytes += size_bytes
        for entry in evicted:
            self._evict(entry)
        try:
            await self._threads.run(self._discard, evicted)
        except BaseException:
            self.release(size_bytes)
            raise
        return True

    def release(self, size_bytes: int) -> None:
        """Release memory that was reserved for a state that was not committed."""
        self._used_bytes -= size_bytes

    async def put(self, cached: CachedVersion) -> None:
        """Make a verified version in memory visible; a pinned one is spilled first."""
        entry = _Entry(cached)
        self._touch()
        await self._threads.run(self._cache.put, cached)
        failpoints.reach('weights.recorded')
        if is_durable(cached.record):
            async with entry.lock:
                await self._write_through(entry)
        await self.drop_replaced(cached.record.key)
        self._insert(entry)

    async def drop_replaced(self, key: _Key) -> None:
        """Remove from memory a version that another state has replaced under the same key."""
        replaced = self._entries.get(key)
        if replaced is not None:
            replaced.is_removed = True
            async with replaced.lock:
                await self._drop(replaced)

    async def note_closed(self, entry: _Entry) -> None:
        """Decrease the number of readers; the last reader of a removed version frees its memory."""
        self._touch()
        entry.reader_count -= 1
        is_evicted = self._entries.get(entry.cached.record.key) is not entry
        if is_evicted and not entry.reader_count:
            await self._threads.run(self._discard, [entry])

    async def _restore(self, cached: CachedVersion, known: Record | None) -> None:
        """Restore a version that an earlier process left in memory, unless the durable store has a later state."""
        record = cached.record
        if known is not None and known.create_time > record.create_time:
            await self._threads.run(self._cache.remove, cached.name)
            return
        await self.drop_replaced(record.key)
        self._used_bytes += cached.manifest.size_bytes
        if known is not None and known.digest == cached.manifest.digest:
            # A change of a record is written to the durable store first, so the durable record is the current one.
            self._insert(_Entry(replace(cached, record=known), is_spilled=True))
        else:
            self._insert(_Entry(cached))

    def _insert(self, entry: _Entry) -> None:
        self._entries[entry.cached.record.key] = entry
        if not entry.is_spilled:
            self._to_spill.put_nowait(entry.cached.record.key)

    def _evictable(self, size_bytes: int) -> Iterator[_Entry]:
        """Yield spilled versions without readers, least recently used first, until `size_bytes` would fit."""
        excess_bytes = self._used_bytes + size_bytes - self._capacity_bytes
        excess_count = len(self._entries) + 1 - _MAX_VERSIONS
        for entry in self._entries.values():
            if excess_bytes <= 0 and excess_count <= 0:
                return
            if entry.is_spilled and not entry.reader_count and not entry.lock.locked():
                excess_bytes -= entry.size_bytes
                excess_count -= 1
                yield entry

    async def _drop(self, entry: _Entry) -> None:
        """Remove a version from memory: remove its record now, and its segment once it has no reader.

        Errors are only logged, because the change that removes the version is already visible.
        """
        entry.is_removed = True
        if self._entries.get(entry.cached.record.key) is entry:
            self._evict(entry)
        try:
            if entry.reader_count:
                await self._threads.run(self._cache.remove_record, entry.cached.name)
            else:
                await self._threads.run(self._discard, [entry])
        except (OSError, StoreUnavailable) as error:
            _log.error('segment not removed', key=str(entry.cached.record.key), error=str(error))

    def _discard(self, entries: Iterable[_Entry]) -> None:
        """Remove records and segments and free the memory; slow for large versions, so call it in a thread."""
        for entry in entries:
            self._cache.remove(entry.cached.name)
            entry.cached.segment.release()

    def _touch(self) -> None:
        self._last_use = asyncio.get_running_loop().time()

    def _evict(self, entry: _Entry) -> None:
        entry.is_removed = True
        del self._entries[entry.cached.record.key]
        self._used_bytes -= entry.size_bytes

    async def _spill_next(self, key: _Key) -> None:
        """Write a version to the durable store, and retry until the write succeeds or the version is removed."""
        entry = self._entries.get(key)
        if entry is None:
            return
        await self._wait_until_quiet(entry)
        retry_seconds = _FIRST_RETRY_SECONDS
        while not entry.is_removed:
            try:
                await self._spill(entry)
                return
            except Exception as error:
                _log.error('spill failed; retrying', error=str(error), retry_seconds=retry_seconds)
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, _MAX_RETRY_SECONDS)

    async def _wait_until_quiet(self, entry: _Entry) -> None:
        """Wait until no version has been used for `quiet_seconds`.

        The wait ends early if the version has waited for `patience_seconds` or was removed, or if more than half of the
        memory is in use.
        """
        loop = asyncio.get_running_loop()
        while not entry.is_removed and 2 * self._used_bytes <= self._capacity_bytes:
            quiet_at = self._last_use + self._quiet_seconds
            deadline = entry.arrival_seconds + self._patience_seconds
            seconds = min(quiet_at, deadline) - loop.time()
            if seconds <= 0:
                return
            await asyncio.sleep(seconds)

    async def _spill(self, entry: _Entry) -> None:
        async with entry.lock:
            await self._write_through(entry)

    async def _write_through(self, entry: _Entry) -> None:
        """Write a version to the durable store unless it was spilled or removed. The caller holds `entry.lock`."""
        if entry.is_spilled or entry.is_removed:
            return
        failpoints.reach('spill.begun')
        cached = entry.cached
        writer = self._durable.begin(cached.record.key, cached.manifest)
        try:
            for chunk in iter_chunks(cached.segment.data):
                if entry.is_removed:
                    return
                await writer.add(chunk)
            await writer.commit(cached.record)
            entry.is_spilled = True
        finally:
            await writer.discard()
        failpoints.reach('spill.done')


def _create_time(cached: CachedVersion) -> datetime:
    return cached.record.create_time


class _MemorySource(BytesInMemory):
    """Implements `StateSource` over a version in memory, whose segment keeps its name until the source is closed."""

    def __init__(self, tier: MemoryTier, entry: _Entry) -> None:
        cached = entry.cached
        super().__init__(cached.manifest, cached.segment.data.toreadonly(), segment=cached.segment.ref)
        self._close = [lambda: tier.note_closed(entry)]

    @property
    def size_bytes(self) -> int:
        return self.manifest.size_bytes

    async def close(self) -> None:
        """Close the source; closing again does nothing."""
        with suppress(IndexError):
            closed = self._close.pop()
            self._data = memoryview(b'')
            await closed()
