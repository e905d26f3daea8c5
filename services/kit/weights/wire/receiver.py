"""The receiver of states: it assembles frames, applies deltas, opens segments, and verifies all results.

A receiver remains usable after a broken stream. The next stream continues at `offset`. If an encoding does not work (a
delta cannot be applied, memory is not shared, or a device transport fails), the receiver raises `EncodingFailed` and
requests plain bytes next.
"""

import asyncio
from dataclasses import dataclass

import structlog

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
from twinkle.checkpoint_engine.errors import InvalidDelta, TransferFailed
from twinkle_services.kit.errors import DomainError, InvalidField, MemoryNotShared, ServiceUnreachable
from twinkle_services.kit.telemetry import measures
from twinkle_services.kit.weights import Commit, Devices, Encoding, Segment, SegmentRef, Segments
from twinkle_services.kit.weights.wire.convert_frames import device_from_proto, encoding_from_proto, segment_from_proto
from twinkle_services.kit.weights.wire.convert_manifest import manifest_from_proto

_log = structlog.get_logger('weights')

_SHARING_ATTEMPTS = 2
"""Number of consecutive failures after which no more segments are requested."""


@dataclass(frozen=True)
class ReceivedState:
    """A complete and verified state."""

    header: weights_pb2.FrameHeader
    """Header of the transfer, with `adapter_id`, and `version` or `checkpoint`."""
    state: PackedState
    encoding: Encoding = Encoding.WHOLE
    """Encoding of the transfer."""
    wire_size_bytes: int = 0
    """Size of the encoded bytes in chunks; 0 for shared memory and device transports."""
    segment_path: str = ''
    """File with the bytes, which other processes can map while `state.data` exists; empty without a segment."""


class EncodingFailed(ServiceUnreachable):
    """The encoding of a transfer cannot be used; the sender can send plain bytes instead."""


class Memory:
    """Shared memory for incoming states, disabled after repeated failures."""

    def __init__(self, segments: Segments | None) -> None:
        """Use a folder of segments; None disables shared memory."""
        self._segments = segments
        self._failures = 0

    @property
    def segments(self) -> Segments | None:
        """Folder of segments; None if shared memory is disabled."""
        return self._segments if self._failures < _SHARING_ATTEMPTS else None

    def report(self, *, is_shared: bool) -> None:
        """Record the result of an attempt to open a segment."""
        self._failures = 0 if is_shared else self._failures + 1

    def give_up(self) -> None:
        """Disable shared memory, because the other end cannot open the segments."""
        self._failures = _SHARING_ATTEMPTS


class DeviceOffers:
    """Device transports that are offered to one sender, until one fails."""

    def __init__(self, devices: Devices | None) -> None:
        """Offer the transports of this service; None to offer none."""
        self._devices = devices
        self.names = () if devices is None else devices.names
        """Names of the offered transports."""

    async def receive(self, header: weights_pb2.FrameHeader, size_bytes: int) -> memoryview:
        """Return the bytes of a state, unverified.

        Raises:
            TransferFailed: The bytes could not be received; the caller should call `give_up`.
        """
        if self._devices is None:
            raise TransferFailed('no transport was offered')
        try:
            transfer = device_from_proto(header.device, 'frame.header.device')
        except InvalidField as error:
            raise TransferFailed(str(error)) from error
        return await self._devices.receive(transfer, size_bytes)

    def give_up(self, problem: str) -> None:
        """Offer nothing from now on."""
        if self._devices is not None:
            _log.warning('device transport failed; requesting bytes', problem=problem)
        self._devices, self.names = None, ()


class Receiver:
    """Assembles the states of a stream and of the streams that resume it."""

    def __init__(
        self, memory: Memory, devices: DeviceOffers, *, held_version: int = 0, held: PackedState | None = None
    ) -> None:
        """Create a receiver.

        Args:
            memory: Shared memory for incoming states.
            devices: Device transports for incoming states.
            held_version: Version that the caller has; only later ones are requested. 0 for none.
            held: State of `held_version`, used as the base of a delta. None: the next version is not sent as a delta.
        """
        self._memory = memory
        self._devices = devices
        self._held = held
        self._incoming: _Incoming | None = None
        self._is_plain_requested = False
        self.held_version = held_version

    @property
    def partial_version(self) -> int:
        """Version that is partially received; 0 for none."""
        return self._incoming.header.version.version if self._incoming is not None else 0

    @property
    def offset(self) -> int:
        """Number of received encoded bytes of the partial version."""
        return self._incoming.next_offset if self._incoming is not None else 0

    @property
    def resume_digest(self) -> str:
        """Digest of the encoded bytes of the partial version; empty without one."""
        return self._incoming.digest if self._incoming is not None else ''

    @property
    def encodings(self) -> frozenset[Encoding]:
        """Accepted encodings in addition to whole states."""
        if self._is_plain_requested:
            return frozenset()
        shared = {Encoding.SHARED_MEMORY} if self._memory.segments is not None else set[Encoding]()
        device = {Encoding.DEVICE} if self._devices.names else set[Encoding]()
        # A receiver without a version receives the base of later deltas from the same stream.
        has_base = self._held is not None or not self.held_version
        return frozenset(shared | device | ({Encoding.DELTA} if has_base else set()))

    @property
    def host_id(self) -> str:
        """Id of the memory from which segments are accepted; empty for none."""
        segments = self._memory.segments
        return '' if segments is None or self._is_plain_requested else segments.host_id

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the accepted device transports."""
        return () if self._is_plain_requested else self._devices.names

    async def take(self, frame: StateChunk | weights_pb2.FrameHeader | Commit) -> ReceivedState | None:
        """Process the next frame, and return the state that it completes, if any.

        Raises:
            DomainError: The frame is damaged or unexpected. The bytes before a damaged chunk remain stored.
            EncodingFailed: The encoding cannot be used; the next stream should send plain bytes.
        """
        try:
            return await self._take(frame)
        except (InvalidDelta, MemoryNotShared, TransferFailed) as error:
            if isinstance(error, TransferFailed):
                self._devices.give_up(str(error))
            self._incoming, self._is_plain_requested = None, True
            raise EncodingFailed('checkpoint') from error
        except StateError as error:
            raise broken_stream() from error

    async def _take(self, frame: StateChunk | weights_pb2.FrameHeader | Commit) -> ReceivedState | None:
        if isinstance(frame, weights_pb2.FrameHeader):
            incoming = self._begin(frame)
            if incoming.encoding is Encoding.DEVICE:
                # The sender sends the commit only after the receiver has all bytes.
                incoming.received = await self._devices.receive(frame, incoming.manifest.size_bytes)
            return None
        if self._incoming is None:
            raise broken_stream()
        if isinstance(frame, StateChunk):
            self._incoming.add(frame)
            return None
        incoming, self._incoming = self._incoming, None
        return await self._finish(incoming)

    def _begin(self, header: weights_pb2.FrameHeader) -> '_Incoming':
        new = _Incoming(header)
        if new.encoding is not Encoding.WHOLE and new.encoding not in self.encodings:
            raise broken_stream()
        if new.encoding is Encoding.DELTA:
            self._check_base(new)
        if self._incoming is None or not self._incoming.is_continued_by(new):
            self._incoming = new
        return self._incoming

    def _check_base(self, new: '_Incoming') -> None:
        """Check that a delta starts from the held version and is not larger than the state."""
        is_held = self._held is not None and new.header.base_version == self.held_version
        if not is_held or not is_delta_possible(new.manifest, self._held.manifest):  # type: ignore[union-attr]
            raise InvalidDelta(0, 'starts from a version that this receiver does not have')
        if not 0 < new.size_bytes <= new.manifest.size_bytes:
            raise InvalidDelta(0, 'is larger than the state')

    async def _finish(self, incoming: '_Incoming') -> ReceivedState:
        segment: Segment | None = None
        if incoming.encoding is Encoding.SHARED_MEMORY:
            segment = await self._open(incoming)
            state = PackedState(incoming.manifest, segment.data)
        elif incoming.encoding is Encoding.DELTA:
            state = await asyncio.to_thread(_applied, incoming, self._held)
        elif incoming.encoding is Encoding.DEVICE:
            state = await asyncio.to_thread(_verified, incoming)
        else:
            state = incoming.finish()
        self._held, self._is_plain_requested = state, False
        # Shared memory and device transports send no chunks.
        measures.received_weights.add(incoming.size_bytes or state.manifest.size_bytes, incoming.encoding.name.lower())
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
            MemoryNotShared: The segment cannot be opened, or its bytes have a different digest.
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
    """A partially received state."""

    def __init__(self, header: weights_pb2.FrameHeader) -> None:
        self.header = header
        self.manifest: WeightManifest = manifest_from_proto(header.manifest, 'frame.header.manifest')
        self.encoding = encoding_from_proto(header.encoding, 'frame.header.encoding')
        self.size_bytes = _encoded_size(self.encoding, header, self.manifest)
        self.digest = header.encoded_digest if self.encoding is Encoding.DELTA else self.manifest.digest
        self._verifier = ChunkVerifier(self.size_bytes, self.digest)
        # Allocated with the first chunk, so that a header alone cannot claim memory.
        self._data: bytearray | None = None
        self.received = memoryview(b'')
        """Unverified bytes that a device transport has received."""

    @property
    def next_offset(self) -> int:
        return self._verifier.next_offset

    @property
    def segment(self) -> SegmentRef:
        return segment_from_proto(self.header.segment)

    def is_continued_by(self, other: '_Incoming') -> bool:
        """Return whether another header announces the rest of the same bytes."""
        is_same = self.digest == other.digest and self.encoding is other.encoding
        is_next = self.next_offset == other.header.resume_offset
        return is_same and is_next and self.manifest == other.manifest and self.next_offset > 0

    def add(self, chunk: StateChunk) -> None:
        self._verifier.accept(chunk)
        if self._data is None:
            self._data = bytearray(self.size_bytes)
        self._data[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data

    def encoded(self) -> memoryview:
        """Return the complete and verified encoded bytes."""
        self._verifier.finish()
        return memoryview(self._data or b'').toreadonly()

    def finish(self) -> PackedState:
        return PackedState(self.manifest, self.encoded())


def _encoded_size(encoding: Encoding, header: weights_pb2.FrameHeader, manifest: WeightManifest) -> int:
    if encoding in (Encoding.SHARED_MEMORY, Encoding.DEVICE):
        return 0
    return header.encoded_size_bytes if encoding is Encoding.DELTA else manifest.size_bytes


def _applied(incoming: _Incoming, held: PackedState | None) -> PackedState:
    """Return the verified state of a delta.

    Raises:
        InvalidDelta: The delta is damaged or yields a different state.
    """
    if held is None:
        raise InvalidDelta(0, 'starts from a version that this receiver does not have')
    try:
        encoded = incoming.encoded()
    except StateError as error:
        raise InvalidDelta(0, str(error)) from error
    data = bytearray(incoming.manifest.size_bytes)
    apply_delta(incoming.manifest, held.data, encoded, data)
    if state_digest(data) != incoming.manifest.digest:
        raise InvalidDelta(0, 'does not lead to the announced state')
    return PackedState(incoming.manifest, memoryview(data).toreadonly())


def _verified(incoming: _Incoming) -> PackedState:
    """Return the verified state that a device transport has received.

    Raises:
        TransferFailed: The bytes are not those of the announced state.
    """
    if state_digest(incoming.received) != incoming.manifest.digest:
        raise TransferFailed('the received bytes are not the announced state')
    return PackedState(incoming.manifest, incoming.received)


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


def broken_stream() -> DomainError:
    """Return the error of a stream that is incomplete or damaged; the next stream may succeed."""
    return ServiceUnreachable('checkpoint')
