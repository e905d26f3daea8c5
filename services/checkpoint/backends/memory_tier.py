"""A store that keeps versions in shared memory first and brings them to a durable store afterwards.

A version is answered once its record lies beside its segment, which outlives the process; the way to
the disk comes later, in the background, once those who wait for the version have had their turn. What
has been brought there stays in memory until others need the room. Checkpoints and pinned versions are
durable before they are answered; so is all that finds no room, and that is what a disk that is too slow
comes to: publishers wait for it then.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

import structlog

from services.checkpoint.backends.folder_writer import outlives_machine
from services.checkpoint.backends.segment_shelf import SegmentShelf, Shelved
from services.checkpoint.backends.tier_writer import TierWriter
from services.checkpoint.domain import CheckpointKey, NewestMark, Record, VersionKey
from services.checkpoint.ports import ByteSource, StateSource, StateStore
from services.kit import failpoints
from services.kit.weights import HeldBytes
from services.kit.worker import Threads
from twinkle.checkpoint_engine import WeightManifest, iter_chunks

_log = structlog.get_logger('memory')

_Key = VersionKey | CheckpointKey
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 30.0
_QUIET_SECONDS = 0.25
_PATIENCE_SECONDS = 1.0


@dataclass(eq=False)
class _Entry:
    """A version in memory."""

    shelved: Shelved
    is_spilled: bool = False
    is_gone: bool = False
    """Deleted or replaced; what reads it reads on."""
    reader_count: int = 0
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """When it came, by the event loop's clock."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the durable store is changed for it."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return self.shelved.manifest.size_bytes


class MemoryTier:
    """Stands before a durable store. Concurrency: one event loop; `run` has to run for memory to empty."""

    def __init__(
        self,
        durable: StateStore,
        shelf: SegmentShelf,
        threads: Threads,
        *,
        capacity_bytes: int,
        quiet_seconds: float = _QUIET_SECONDS,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        """Keep at most `capacity_bytes` in memory.

        Args:
            durable: The store behind it.
            shelf: Where segments and their records lie.
            threads: Where files are worked on.
            capacity_bytes: Most memory that versions take.
            quiet_seconds: Versions go on to the durable store when none came or was read for so long: its work
                would hold up those who wait for the news.
            patience_seconds: They wait no longer than this for quiet.
        """
        self._quiet_seconds = quiet_seconds
        self._patience_seconds = patience_seconds
        self._last_use = float('-inf')
        self._durable = durable
        self._shelf = shelf
        self._threads = threads
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._entries: dict[_Key, _Entry] = {}
        """In the order of their last use."""
        self._waiting: asyncio.Queue[_Key] = asyncio.Queue()
        """What is to be brought to the durable store, by key: a version that was deleted meanwhile takes no memory."""

    @property
    def used_bytes(self) -> int:
        """Memory that is taken, also by what is on its way in."""
        return self._used_bytes

    async def load(self) -> list[Record | NewestMark]:
        """Return what is durable and what is in memory, which is to become durable."""
        found = await self._durable.load()
        durable = {item.key: item for item in found if not isinstance(item, NewestMark)}
        for shelved in sorted(await self._threads.run(self._shelf.load), key=_create_time):
            await self._restore(shelved, durable.get(shelved.record.key))
        records = durable | {key: entry.shelved.record for key, entry in self._entries.items()}
        return [*records.values(), *(item for item in found if isinstance(item, NewestMark))]

    async def run(self) -> None:
        """Bring versions to the durable store, one after the other, for ever."""
        while True:
            await self._spill_next(await self._waiting.get())

    async def flush(self) -> None:
        """Bring all there is to the durable store, and leave the memory; `run` must have ended."""
        for entry in list(self._entries.values()):
            await self._spill(entry)
            await self._threads.run(self._shelf.remove, entry.shelved.name)

    def begin(self, key: _Key, manifest: WeightManifest) -> TierWriter:
        """Return a writer; it chooses between memory and the durable store at its first call."""
        durable = self._durable.begin(key, manifest)
        return TierWriter(self, durable, key, manifest, shelf=self._shelf, threads=self._threads)

    async def open_state(self, key: _Key, *, is_adapter_only: bool) -> StateSource:
        """Open a state; see the port."""
        entry = self._entries.get(key)
        if entry is None:
            return await self._durable.open_state(key, is_adapter_only=is_adapter_only)
        self._entries[key] = self._entries.pop(key)
        entry.reader_count += 1
        self._touch()
        return _MemorySource(self, entry)

    async def open_archive(self, key: CheckpointKey) -> ByteSource:
        """Open a checkpoint as an archive; see the port."""
        return await self._durable.open_archive(key)

    async def update(self, record: Record) -> None:
        """Replace the record of a committed state; one that is pinned becomes durable first."""
        while (entry := self._entries.get(record.key)) is not None:
            async with entry.changing:
                if await self._update(entry, record):
                    return
            # It was deleted or replaced while this call waited, or leaves the memory just now.
            await asyncio.sleep(0)
        await self._durable.update(record)

    async def _update(self, entry: _Entry, record: Record) -> bool:
        """Replace the record of a version in memory; False where the version is gone."""
        if outlives_machine(record):
            await self._bring(entry)
        if entry.is_gone:
            return False
        if entry.is_spilled:
            await self._durable.update(record)
        entry.shelved = replace(entry.shelved, record=record)
        await self._threads.run(self._shelf.put, entry.shelved)
        return True

    async def mark_newest(self, mark: NewestMark) -> None:
        """Remember a number, durably."""
        await self._durable.mark_newest(mark)

    async def delete(self, key: _Key) -> None:
        """Remove a state from memory and from the durable store."""
        entry = self._entries.get(key)
        if entry is None:
            await self._durable.delete(key)
            return
        entry.is_gone = True
        async with entry.changing:
            await self._drop(entry)
            await self._durable.delete(key)

    async def take_room(self, size_bytes: int) -> bool:
        """Take memory for a state, where there is room or what is spilled can make it; say whether there was."""
        self._touch()
        spare = list(self._spare(size_bytes - (self._capacity_bytes - self._used_bytes)))
        if self._used_bytes - sum(entry.size_bytes for entry in spare) + size_bytes > self._capacity_bytes:
            return False
        self._used_bytes += size_bytes
        for entry in spare:
            self._forget(entry)
        try:
            await self._threads.run(self._discard, spare)
        except BaseException:
            self.give_room(size_bytes)
            raise
        return True

    def give_room(self, size_bytes: int) -> None:
        """Give memory back that was taken for a state that did not come."""
        self._used_bytes -= size_bytes

    async def put(self, shelved: Shelved) -> None:
        """Make a verified state in memory visible; a pinned one is durable first."""
        entry = _Entry(shelved)
        self._touch()
        await self._threads.run(self._shelf.put, shelved)
        failpoints.reach('weights.recorded')
        if outlives_machine(shelved.record):
            async with entry.changing:
                await self._bring(entry)
        await self.forget_replaced(shelved.record.key)
        self._insert(entry)

    async def forget_replaced(self, key: _Key) -> None:
        """Take a state from memory that another one of its key has replaced."""
        replaced = self._entries.get(key)
        if replaced is not None:
            replaced.is_gone = True
            async with replaced.changing:
                await self._drop(replaced)

    async def closed(self, entry: _Entry) -> None:
        """Take note that a reader has closed."""
        self._touch()
        entry.reader_count -= 1
        if entry.is_gone and not entry.reader_count:
            await self._threads.run(self._discard, [entry])

    async def _restore(self, shelved: Shelved, known: Record | None) -> None:
        """Take in what a process before this one left in memory; of two states of a key the later one counts."""
        record = shelved.record
        if known is not None and known.create_time > record.create_time:
            await self._threads.run(self._shelf.remove, shelved.name)
            return
        await self.forget_replaced(record.key)
        self._used_bytes += shelved.manifest.size_bytes
        if known is not None and known.digest == shelved.manifest.digest:
            # A record is changed there first.
            self._insert(_Entry(replace(shelved, record=known), is_spilled=True))
        else:
            self._insert(_Entry(shelved))

    def _insert(self, entry: _Entry) -> None:
        self._entries[entry.shelved.record.key] = entry
        if not entry.is_spilled:
            self._waiting.put_nowait(entry.shelved.record.key)

    def _spare(self, size_bytes: int) -> Iterator[_Entry]:
        """Yield what can leave the memory, the longest unused first, until it makes up `size_bytes`."""
        for entry in self._entries.values():
            if size_bytes <= 0:
                return
            if entry.is_spilled and not entry.reader_count and not entry.changing.locked():
                size_bytes -= entry.size_bytes
                yield entry

    async def _drop(self, entry: _Entry) -> None:
        """Take a version from memory; its record goes now, its segment when nobody is being told its name."""
        entry.is_gone = True
        if self._entries.get(entry.shelved.record.key) is entry:
            self._forget(entry)
        if entry.reader_count:
            await self._threads.run(self._shelf.remove_record, entry.shelved.name)
        else:
            await self._threads.run(self._discard, [entry])

    def _discard(self, entries: Iterable[_Entry]) -> None:
        """Remove versions, names and memory; giving back the pages of a large one takes a while, so in a thread."""
        for entry in entries:
            self._shelf.remove(entry.shelved.name)
            entry.shelved.segment.let_go()

    def _touch(self) -> None:
        self._last_use = asyncio.get_running_loop().time()

    def _forget(self, entry: _Entry) -> None:
        entry.is_gone = True
        del self._entries[entry.shelved.record.key]
        self._used_bytes -= entry.size_bytes

    async def _spill_next(self, key: _Key) -> None:
        """Bring a version to the durable store, however often that takes, as long as it is wanted."""
        entry = self._entries.get(key)
        if entry is None:
            return
        await self._until_quiet(entry)
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not entry.is_gone:
            try:
                await self._spill(entry)
                return
            except Exception as error:
                _log.error('a version waits in memory for its store', error=str(error), again_seconds=pause_seconds)
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    async def _until_quiet(self, entry: _Entry) -> None:
        """Wait for a moment in which nobody publishes or fetches; not for long, and not while memory is short."""
        loop = asyncio.get_running_loop()
        while not entry.is_gone and 2 * self._used_bytes <= self._capacity_bytes:
            seconds = min(self._last_use + self._quiet_seconds, entry.since + self._patience_seconds) - loop.time()
            if seconds <= 0:
                return
            await asyncio.sleep(seconds)

    async def _spill(self, entry: _Entry) -> None:
        async with entry.changing:
            await self._bring(entry)

    async def _bring(self, entry: _Entry) -> None:
        """Write a version to the durable store, unless it is there or is not wanted any more."""
        if entry.is_spilled or entry.is_gone:
            return
        failpoints.reach('spill.begun')
        shelved = entry.shelved
        writer = self._durable.begin(shelved.record.key, shelved.manifest)
        try:
            for chunk in iter_chunks(shelved.segment.data):
                if entry.is_gone:
                    return
                await writer.add(chunk)
            await writer.commit(shelved.record)
            entry.is_spilled = True
        finally:
            await writer.discard()
        failpoints.reach('spill.done')


def _create_time(shelved: Shelved) -> datetime:
    return shelved.record.create_time


class _MemorySource(HeldBytes):
    """A version in memory, as long as it is open; its segment keeps its name so long."""

    def __init__(self, tier: MemoryTier, entry: _Entry) -> None:
        shelved = entry.shelved
        super().__init__(shelved.manifest, shelved.segment.data.toreadonly(), segment=shelved.segment.ref)
        self._close = [lambda: tier.closed(entry)]

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""
        return self.manifest.size_bytes

    async def close(self) -> None:
        """Let go of it; again is harmless."""
        with suppress(IndexError):
            closed = self._close.pop()
            self._data = memoryview(b'')
            await closed()
