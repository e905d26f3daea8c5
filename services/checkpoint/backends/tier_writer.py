"""Writer of the memory tier. It uses a segment for a version that fits in memory, and otherwise the durable store."""

from threading import Lock
from typing import Protocol

from twinkle.checkpoint_engine import ChunkVerifier, StateChunk, WeightManifest, iter_chunks, state_digest
from twinkle_services.checkpoint.backends.errors import domain_errors
from twinkle_services.checkpoint.backends.segment_cache import CachedVersion, SegmentCache
from twinkle_services.checkpoint.domain import CheckpointKey, Record, VersionKey
from twinkle_services.checkpoint.ports import StateWriter
from twinkle_services.kit import failpoints
from twinkle_services.kit.errors import DigestMismatch, InvalidField, StoreUnavailable, StreamOutOfOrder
from twinkle_services.kit.weights import Segment, SegmentRef
from twinkle_services.kit.worker import Threads


class Tier(Protocol):
    """The part of the memory tier that its writers use: a memory budget, and the set of visible versions."""

    async def reserve(self, size_bytes: int) -> bool:
        """Reserve memory; return whether there was enough."""
        ...

    def release(self, size_bytes: int) -> None:
        """Release reserved memory."""
        ...

    async def put(self, cached: CachedVersion) -> None:
        """Make a verified version in memory visible."""
        ...

    async def drop_replaced(self, key: VersionKey | CheckpointKey) -> None:
        """Remove from memory a version that another state has replaced under the same key."""
        ...


class TierWriter:
    """Implements `StateWriter` for the memory tier."""

    def __init__(
        self,
        tier: Tier,
        durable: StateWriter,
        key: VersionKey | CheckpointKey,
        manifest: WeightManifest,
        *,
        cache: SegmentCache,
        threads: Threads,
    ) -> None:
        """Create a writer; neither memory nor `durable` is used before the first call."""
        self._tier = tier
        self._durable = durable
        self._key = key
        self._manifest = manifest
        self._cache = cache
        self._threads = threads
        self._receiver: _Receiver | None = None
        self._is_begun = False

    @property
    def folder(self) -> str:
        return self._durable.folder

    async def add(self, chunk: StateChunk) -> None:
        if not self._is_begun:
            self._is_begun = True
            await self._open()
        if self._receiver is None:
            await self._durable.add(chunk)
        else:
            await self._threads.run(self._receiver.add, chunk)
        failpoints.reach('weights.chunk')

    async def adopt(self, segment: SegmentRef) -> None:
        if segment.size_bytes != self._manifest.size_bytes:
            problem = f'is {segment.size_bytes}, must be {self._manifest.size_bytes} as in the manifest'
            raise InvalidField('frame.header.segment.size_bytes', problem)
        if self._is_begun:
            raise StreamOutOfOrder('a chunk or the commit')
        self._is_begun = True
        if await self._reserve():
            self._receiver = _Receiver(self._manifest, self._cache)
            await self._threads.run(self._receiver.adopt, segment)
        else:
            opened = await self._threads.run(self._cache.segments.adopt, segment)
            for chunk in iter_chunks(opened.data):
                await self._durable.add(chunk)

    async def commit(self, record: Record) -> None:
        if not self._is_begun and self._manifest.size_bytes:
            raise StreamOutOfOrder.at_byte(0)
        failpoints.reach('weights.received')
        if self._receiver is None:
            await self._durable.commit(record)
            await self._tier.drop_replaced(self._key)
            return
        await self._threads.run(self._receiver.verify)
        failpoints.reach('weights.verified')
        await self._tier.put(CachedVersion(self._receiver.name, record, self._manifest, self._receiver.segment))
        self._receiver = None

    async def discard(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._tier.release(self._manifest.size_bytes)
            await self._threads.run(receiver.discard)
        await self._durable.discard()

    async def _reserve(self) -> bool:
        """Reserve memory if the state is a version without a trainer section; return whether it was reserved."""
        size_bytes = self._manifest.size_bytes
        may_be_cached = isinstance(self._key, VersionKey) and not self._manifest.is_trainer_included
        return may_be_cached and size_bytes > 0 and await self._tier.reserve(size_bytes)

    async def _open(self) -> None:
        """Open a segment if memory can be reserved; otherwise the durable store receives the chunks."""
        if not await self._reserve():
            return
        # Set before the segment is opened, so that `discard` removes the segment even if this call is cancelled.
        self._receiver = _Receiver(self._manifest, self._cache)
        try:
            await self._threads.run(self._receiver.open)
        except (OSError, StoreUnavailable):
            # The host has less free memory than configured, or too many files are open.
            self._receiver = None
            self._tier.release(self._manifest.size_bytes)


class _Receiver:
    """Fills one segment. Methods run in worker threads; `discard` may run concurrently with another method."""

    def __init__(self, manifest: WeightManifest, cache: SegmentCache) -> None:
        self.name = cache.new_name()
        self._manifest = manifest
        self._cache = cache
        self._segment: Segment | None = None
        self._verifier: ChunkVerifier | None = None
        self._is_closed = False
        self._lock = Lock()

    @property
    def segment(self) -> Segment:
        """The open segment."""
        if self._segment is None:
            raise RuntimeError('no segment is open')
        return self._segment

    def open(self) -> None:
        """Create a segment into which chunks are copied."""
        with self._lock:
            if not self._is_closed:
                self._segment = self._cache.create(self.name, self._manifest.size_bytes)
                self._verifier = ChunkVerifier(self._manifest.size_bytes, self._manifest.digest)

    def adopt(self, ref: SegmentRef) -> None:
        """Take over a complete segment of another process."""
        with self._lock:
            if not self._is_closed:
                self._segment = self._cache.adopt(self.name, ref)

    def add(self, chunk: StateChunk) -> None:
        """Verify a chunk and copy it into the segment."""
        with self._lock, domain_errors():
            if self._verifier is None:
                raise StreamOutOfOrder('the commit')
            self._verifier.accept(chunk)
            self.segment.data[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data

    def verify(self) -> None:
        """Check that all bytes have arrived and match the manifest's digest."""
        with self._lock, domain_errors():
            if self._verifier is not None:
                self._verifier.finish()
                return
            actual = state_digest(self.segment.data)
            if actual != self._manifest.digest:
                raise DigestMismatch(self._manifest.digest, actual, field='frame.header.manifest.digest')

    def discard(self) -> None:
        with self._lock:
            self._is_closed = True
            self._segment = None
            self._cache.remove(self.name)
