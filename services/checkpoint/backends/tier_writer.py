"""A state on its way into the memory tier: into a segment where there is room, else into the durable store."""

from threading import Lock
from typing import Protocol

from services.checkpoint.backends.checked_chunks import domain_errors
from services.checkpoint.backends.segment_shelf import SegmentShelf, Shelved
from services.checkpoint.domain import CheckpointKey, Record, VersionKey
from services.checkpoint.ports import StateWriter
from services.kit import failpoints
from services.kit.errors import DigestMismatch, InvalidField, StreamOutOfOrder
from services.kit.weights import Segment, SegmentRef
from services.kit.worker import Threads
from twinkle.checkpoint_engine import ChunkVerifier, StateChunk, WeightManifest, iter_chunks, state_digest


class Room(Protocol):
    """Where verified states go, and what memory they may take."""

    async def take_room(self, size_bytes: int) -> bool:
        """Take memory; say whether there was."""
        ...

    def give_room(self, size_bytes: int) -> None:
        """Give memory back."""
        ...

    async def put(self, shelved: Shelved) -> None:
        """Make a verified state in memory visible."""
        ...

    async def forget_replaced(self, key: VersionKey | CheckpointKey) -> None:
        """Take a state from memory that another one has replaced."""
        ...


class TierWriter:
    """One state on its way; see `StateWriter`."""

    def __init__(
        self,
        room: Room,
        durable: StateWriter,
        key: VersionKey | CheckpointKey,
        manifest: WeightManifest,
        *,
        shelf: SegmentShelf,
        threads: Threads,
    ) -> None:
        """Write into a segment, or by `durable`; nothing is touched before the first call."""
        self._room = room
        self._durable = durable
        self._key = key
        self._manifest = manifest
        self._shelf = shelf
        self._threads = threads
        self._receiver: _Receiver | None = None
        self._is_begun = False

    @property
    def folder(self) -> str:
        """The peft folder it becomes, where the durable store is a local disk; else empty."""
        return self._durable.folder

    async def add(self, chunk: StateChunk) -> None:
        """Take the next chunk; see the port."""
        if not self._is_begun:
            self._is_begun = True
            await self._open()
        if self._receiver is None:
            await self._durable.add(chunk)
        else:
            await self._threads.run(self._receiver.add, chunk)
        failpoints.reach('weights.chunk')

    async def adopt(self, segment: SegmentRef) -> None:
        """Take all bytes from a segment; see the port."""
        if segment.size_bytes != self._manifest.size_bytes:
            problem = f'is {segment.size_bytes}, the manifest says {self._manifest.size_bytes}'
            raise InvalidField('frame.header.segment.size_bytes', problem)
        if self._is_begun:
            raise StreamOutOfOrder('a chunk or the commit')
        self._is_begun = True
        if await self._takes_room():
            self._receiver = _Receiver(self._manifest, self._shelf)
            await self._threads.run(self._receiver.adopt, segment)
        else:
            opened = await self._threads.run(self._shelf.segments.adopt, segment)
            for chunk in iter_chunks(opened.data):
                await self._durable.add(chunk)

    async def commit(self, record: Record) -> None:
        """Make the state visible; see the port."""
        if not self._is_begun and self._manifest.size_bytes:
            raise StreamOutOfOrder.at_byte(0)
        failpoints.reach('weights.received')
        if self._receiver is None:
            await self._durable.commit(record)
            await self._room.forget_replaced(self._key)
            return
        await self._threads.run(self._receiver.verify)
        failpoints.reach('weights.verified')
        await self._room.put(Shelved(self._receiver.name, record, self._manifest, self._receiver.segment))
        self._receiver = None

    async def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._room.give_room(self._manifest.size_bytes)
            await self._threads.run(receiver.discard)
        await self._durable.discard()

    async def _takes_room(self) -> bool:
        """Take memory where the state may lie in it: a version, which has no part for a trainer alone."""
        size_bytes = self._manifest.size_bytes
        is_for_memory = isinstance(self._key, VersionKey) and not self._manifest.is_trainer_included
        return is_for_memory and size_bytes > 0 and await self._room.take_room(size_bytes)

    async def _open(self) -> None:
        """Open a segment where there is memory; the durable store takes the chunks otherwise."""
        if not await self._takes_room():
            return
        # Known before it is opened: should this call be cancelled, `discard` finds what its thread still does.
        self._receiver = _Receiver(self._manifest, self._shelf)
        try:
            await self._threads.run(self._receiver.open)
        except OSError:
            # The host has less memory left than was allowed.
            self._receiver = None
            self._room.give_room(self._manifest.size_bytes)


class _Receiver:
    """A segment that fills up. Its methods work in threads; `discard` may come while another one's is at work."""

    def __init__(self, manifest: WeightManifest, shelf: SegmentShelf) -> None:
        self.name = shelf.new_name()
        self._manifest = manifest
        self._shelf = shelf
        self._segment: Segment | None = None
        self._verifier: ChunkVerifier | None = None
        self._is_over = False
        self._lock = Lock()

    @property
    def segment(self) -> Segment:
        """What was opened."""
        if self._segment is None:
            raise RuntimeError('nothing was opened')
        return self._segment

    def open(self) -> None:
        """Make a segment for chunks to be copied into."""
        with self._lock:
            if not self._is_over:
                self._segment = self._shelf.create(self.name, self._manifest.size_bytes)
                self._verifier = ChunkVerifier(self._manifest.size_bytes, self._manifest.digest)

    def adopt(self, ref: SegmentRef) -> None:
        """Take a segment that is whole already."""
        with self._lock:
            if not self._is_over:
                self._segment = self._shelf.adopt(self.name, ref)

    def add(self, chunk: StateChunk) -> None:
        """Copy a chunk in, once it was checked."""
        with self._lock, domain_errors():
            if self._verifier is None:
                raise StreamOutOfOrder('the commit')
            self._verifier.accept(chunk)
            self.segment.data[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data

    def verify(self) -> None:
        """Make sure that the bytes are the promised ones."""
        with self._lock, domain_errors():
            if self._verifier is not None:
                self._verifier.finish()
                return
            actual = state_digest(self.segment.data)
            if actual != self._manifest.digest:
                raise DigestMismatch(self._manifest.digest, actual)

    def discard(self) -> None:
        """Remove the segment."""
        with self._lock:
            self._is_over = True
            self._segment = None
            self._shelf.remove(self.name)
