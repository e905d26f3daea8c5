"""Frames back to states: whole, from a delta to what is held, or from a segment. Nothing unverified leaves.

A receiver outlives a broken stream: the next one is asked to go on at `offset`. Where a way of sending
does not work here (a delta that does not apply, memory that is not shared after all) it raises
`OtherWay`, and the next stream is asked for plain bytes.
"""

import asyncio
from dataclasses import dataclass

from services.kit.errors import DomainError, MemoryNotShared, ServiceUnreachable
from services.kit.weights import Commit, Encoding, Segment, SegmentRef, Segments
from services.kit.weights.wire.convert_frames import encoding_from_proto, segment_from_proto
from services.kit.weights.wire.convert_manifest import manifest_from_proto
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import (
    ChunkVerifier,
    PackedState,
    StateChunk,
    StateError,
    WeightManifest,
    state_digest,
)
from twinkle.checkpoint_engine.delta import apply_delta, is_delta_possible
from twinkle.checkpoint_engine.errors import InvalidDelta

_SHARING_ATTEMPTS = 2
"""Segments in a row that could not be opened until no more are asked for."""


@dataclass(frozen=True)
class ReceivedState:
    """A state, whole and verified."""

    header: weights_pb2.FrameHeader
    """Says what it is: `adapter_id`, and `version` or `checkpoint`."""
    state: PackedState
    encoding: Encoding = Encoding.WHOLE
    """How it came."""
    wire_size_bytes: int = 0
    """Encoded bytes of it; 0 where it came in shared memory."""
    segment_path: str = ''
    """The file that holds its bytes, for other processes to map; there as long as `state.data` lives. Empty: none."""


class OtherWay(ServiceUnreachable):
    """This way of sending does not work; another one will."""


class Memory:
    """Whether states may come in shared memory: as long as that works."""

    def __init__(self, segments: Segments | None) -> None:
        """Use a folder of segments; None where there is none."""
        self._segments = segments
        self._failures = 0

    @property
    def segments(self) -> Segments | None:
        """The folder; None where memory is not shared, or turned out not to be."""
        return self._segments if self._failures < _SHARING_ATTEMPTS else None

    def report(self, *, is_shared: bool) -> None:
        """Take note of how an attempt ended."""
        self._failures = 0 if is_shared else self._failures + 1

    def give_up(self) -> None:
        """Take note that the other end sees other memory."""
        self._failures = _SHARING_ATTEMPTS


class Receiver:
    """Puts the states of one stream together, and of the streams that take it up."""

    def __init__(self, memory: Memory, *, held_version: int = 0, held: PackedState | None = None) -> None:
        """Begin with what is held already.

        Args:
            memory: Whether segments may come.
            held_version: Only later versions are wanted; 0 for any.
            held: Its state, as the base of a delta. Unset: the next version comes without one.
        """
        self._memory = memory
        self._held = held
        self._incoming: _Incoming | None = None
        self._is_plain_wanted = False
        self.held_version = held_version

    @property
    def half_version(self) -> int:
        """The version that is half received; 0 for none."""
        return self._incoming.header.version.version if self._incoming is not None else 0

    @property
    def offset(self) -> int:
        """How many encoded bytes of it are held."""
        return self._incoming.next_offset if self._incoming is not None else 0

    @property
    def resume_digest(self) -> str:
        """Of what they are the beginning of; empty where nothing is half received."""
        return self._incoming.digest if self._incoming is not None else ''

    @property
    def encodings(self) -> frozenset[Encoding]:
        """What may come beside whole states."""
        if self._is_plain_wanted:
            return frozenset()
        shared = {Encoding.SHARED_MEMORY} if self._memory.segments is not None else set[Encoding]()
        # Who holds nothing yet will hold the base of the next delta of the same stream.
        is_base_at_hand = self._held is not None or not self.held_version
        return frozenset(shared | ({Encoding.DELTA} if is_base_at_hand else set()))

    @property
    def host_id(self) -> str:
        """Of the memory that segments may come from; empty for none."""
        segments = self._memory.segments
        return '' if segments is None or self._is_plain_wanted else segments.host_id

    async def take(self, frame: StateChunk | weights_pb2.FrameHeader | Commit) -> ReceivedState | None:
        """Take the next frame; return the state it completed, if it did.

        Raises:
            DomainError: the frame is damaged; what was held before it is kept.
            OtherWay: what came cannot be used; plain bytes are asked for next.
        """
        try:
            return await self._take(frame)
        except (InvalidDelta, MemoryNotShared) as error:
            self._incoming, self._is_plain_wanted = None, True
            raise OtherWay('checkpoint') from error
        except StateError as error:
            raise broken() from error

    async def _take(self, frame: StateChunk | weights_pb2.FrameHeader | Commit) -> ReceivedState | None:
        if isinstance(frame, weights_pb2.FrameHeader):
            self._begin(frame)
            return None
        if self._incoming is None:
            raise broken()
        if isinstance(frame, StateChunk):
            self._incoming.add(frame)
            return None
        incoming, self._incoming = self._incoming, None
        return await self._finish(incoming)

    def _begin(self, header: weights_pb2.FrameHeader) -> None:
        new = _Incoming(header)
        if new.encoding is not Encoding.WHOLE and new.encoding not in self.encodings:
            raise broken()
        if new.encoding is Encoding.DELTA:
            self._check_base(new)
        is_continued = self._incoming is not None and self._incoming.is_continued_by(new)
        if not is_continued:
            self._incoming = new

    def _check_base(self, new: '_Incoming') -> None:
        """Refuse a delta to something else than what is held, or one that is larger than what it saves."""
        is_held = self._held is not None and new.header.base_version == self.held_version
        if not is_held or not is_delta_possible(new.manifest, self._held.manifest):  # type: ignore[union-attr]
            raise InvalidDelta(0, 'starts from what is not held')
        if not 0 < new.size_bytes <= new.manifest.size_bytes:
            raise InvalidDelta(0, 'is larger than the state')

    async def _finish(self, incoming: '_Incoming') -> ReceivedState:
        segment: Segment | None = None
        if incoming.encoding is Encoding.SHARED_MEMORY:
            segment = await self._open(incoming)
            state = PackedState(incoming.manifest, segment.data)
        elif incoming.encoding is Encoding.DELTA:
            state = await asyncio.to_thread(_applied, incoming, self._held)
        else:
            state = incoming.finish()
        self._held, self._is_plain_wanted = state, False
        self.held_version = incoming.header.version.version
        return ReceivedState(
            incoming.header,
            state,
            encoding=incoming.encoding,
            wire_size_bytes=incoming.size_bytes,
            segment_path='' if segment is None else segment.path,
        )

    async def _open(self, incoming: '_Incoming') -> Segment:
        """Return the verified segment of a state.

        Raises:
            MemoryNotShared: it cannot be opened, or holds something else.
        """
        segments = self._memory.segments
        if segments is None:
            raise MemoryNotShared()
        try:
            segment = await asyncio.to_thread(_adopted, segments, incoming)
        except MemoryNotShared:
            self._memory.report(is_shared=False)
            raise
        self._memory.report(is_shared=True)
        return segment


class _Incoming:
    """The encoded bytes of one state on their way in."""

    def __init__(self, header: weights_pb2.FrameHeader) -> None:
        self.header = header
        self.manifest: WeightManifest = manifest_from_proto(header.manifest, 'frame.header.manifest')
        self.encoding = encoding_from_proto(header.encoding, 'frame.header.encoding')
        self.size_bytes = _encoded_size(self.encoding, header, self.manifest)
        self.digest = header.encoded_digest if self.encoding is Encoding.DELTA else self.manifest.digest
        self._verifier = ChunkVerifier(self.size_bytes, self.digest)
        # Taken as bytes come: a header alone costs no memory of that size.
        self._data: bytearray | None = None

    @property
    def next_offset(self) -> int:
        return self._verifier.next_offset

    @property
    def segment(self) -> SegmentRef:
        return segment_from_proto(self.header.segment)

    def is_continued_by(self, other: '_Incoming') -> bool:
        """Say whether another header announces the rest of these very bytes."""
        is_same = self.digest == other.digest and self.encoding is other.encoding
        is_next = self.next_offset == other.header.resume_offset
        return is_same and is_next and self.manifest == other.manifest and self.next_offset > 0

    def add(self, chunk: StateChunk) -> None:
        self._verifier.accept(chunk)
        if self._data is None:
            self._data = bytearray(self.size_bytes)
        self._data[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data

    def encoded(self) -> memoryview:
        """Return the bytes, all of them and the right ones."""
        self._verifier.finish()
        return memoryview(self._data or b'').toreadonly()

    def finish(self) -> PackedState:
        return PackedState(self.manifest, self.encoded())


def _encoded_size(encoding: Encoding, header: weights_pb2.FrameHeader, manifest: WeightManifest) -> int:
    if encoding is Encoding.SHARED_MEMORY:
        return 0
    return header.encoded_size_bytes if encoding is Encoding.DELTA else manifest.size_bytes


def _applied(incoming: _Incoming, held: PackedState | None) -> PackedState:
    """Return the verified state of a delta.

    Raises:
        InvalidDelta: it is not what was announced, or does not lead there.
    """
    if held is None:
        raise InvalidDelta(0, 'starts from what is not held')
    try:
        encoded = incoming.encoded()
    except StateError as error:
        raise InvalidDelta(0, str(error)) from error
    data = bytearray(incoming.manifest.size_bytes)
    apply_delta(incoming.manifest, held.data, encoded, data)
    if state_digest(data) != incoming.manifest.digest:
        raise InvalidDelta(0, 'leads to another state than was announced')
    return PackedState(incoming.manifest, memoryview(data).toreadonly())


def _adopted(segments: Segments, incoming: _Incoming) -> Segment:
    ref = incoming.segment
    if ref.size_bytes != incoming.manifest.size_bytes:
        raise MemoryNotShared()
    try:
        segment = segments.adopt(ref)
    except OSError as error:
        raise MemoryNotShared() from error
    if state_digest(segment.data) != incoming.manifest.digest:
        raise MemoryNotShared()
    return segment


def broken() -> DomainError:
    """Return what a stream that ended too soon, or brought damage, is told as; the next one may do better."""
    return ServiceUnreachable('checkpoint')
