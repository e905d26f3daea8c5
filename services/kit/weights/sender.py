"""The sender of states, which chooses the cheapest encoding and resumes interrupted transfers."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from twinkle.checkpoint_engine import CHUNK_BYTES, StateChunk, chunk_checksum
from twinkle.checkpoint_engine.delta import is_delta_possible
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.weights.delta_cache import Delta, Deltas
from twinkle_services.kit.weights.devices import Devices, OutgoingState
from twinkle_services.kit.weights.frames import Commit, Encoding, Frame, Header
from twinkle_services.kit.weights.state_bytes import BytesInMemory, StateBytes
from twinkle_services.kit.worker import Threads


@dataclass(frozen=True)
class ReceiverOptions:
    """Encodings that a receiver accepts, and the position at which it resumes an interrupted transfer."""

    encodings: frozenset[Encoding] = frozenset()
    """Accepted encodings in addition to WHOLE, which every receiver accepts."""
    host_id: str = ''
    """Id of the receiver's shared memory, for SHARED_MEMORY."""
    transports: frozenset[str] = frozenset()
    """Names of the transports that the receiver offers, for DEVICE."""
    resume_offset: int = 0
    """Number of encoded bytes that the receiver has; 0 for none."""
    resume_digest: str = ''
    """Digest of the complete encoded bytes whose beginning the receiver has; empty if it is the digest of the state."""


@dataclass(frozen=True)
class Base:
    """A version that the receiver has, and that can be the base of a delta."""

    version: int
    open: Callable[[], Awaitable[StateBytes | None]]
    """Opens the bytes of the version; returns None if they are no longer available."""


class Sender:
    """Converts states to frames. A service has one sender, so that receivers share encoded deltas.

    Concurrency: many transfers may run at the same time; each has at most one chunk and one delta in memory.
    """

    def __init__(self, threads: Threads, *, delta_bytes: int = 256 << 20, devices: Devices | None = None) -> None:
        """Create a sender.

        Args:
            threads: Threads that encode.
            delta_bytes: Approximate maximum size of the cached deltas.
            devices: Device transports of this service; None to send all bytes as chunks.
        """
        self._deltas = Deltas(threads, capacity_bytes=delta_bytes)
        self._devices = devices

    async def frames(
        self,
        header: Header,
        source: StateBytes,
        *,
        receiver: ReceiverOptions = ReceiverOptions(),
        base: Base | None = None,
        offset_field: str = 'resume_offset',
    ) -> AsyncGenerator[Frame, None]:
        """Yield the frames of a state.

        Each chunk is read once the receiver has consumed the previous one.

        Args:
            header: Header without the encoding, which this method chooses.
            source: Bytes of the state; closed when the generator finishes.
            receiver: Encodings and position that the receiver requests.
            base: Version that the receiver has; None if it has no version.
            offset_field: Field of the request with the offset, for errors.

        Raises:
            InvalidField: The offset is beyond the end of the encoded bytes.
            ServiceUnreachable: A device transport failed after the header; the receiver will request the bytes.
        """
        try:
            is_offered = Encoding.DEVICE in receiver.encodings
            if is_offered and (outgoing := await self._outgoing(source, receiver)) is not None:
                async with outgoing:
                    yield replace(header, encoding=Encoding.DEVICE, device=outgoing.transfer)
                    await outgoing.send(source)
                yield Commit(header.manifest.digest)
                return
            header, encoded = await self._encoded(header, source, receiver, base)
            header = header.resumed(_offset(header, receiver, offset_field))
            yield header
            async with aclosing(_chunks(header, encoded)) as chunks:
                async for chunk in chunks:
                    yield chunk
            yield Commit(header.manifest.digest)
        finally:
            await source.close()

    async def _outgoing(self, source: StateBytes, receiver: ReceiverOptions) -> OutgoingState | None:
        """Return a transfer over an offered device transport; None if chunks or a segment should be sent."""
        if self._devices is None or _is_shared(source, receiver):
            return None
        return await self._devices.prepare(receiver.transports, source.manifest.size_bytes)

    async def _encoded(
        self, header: Header, source: StateBytes, receiver: ReceiverOptions, base: Base | None
    ) -> tuple[Header, StateBytes]:
        """Return the header with the chosen encoding, and the encoded bytes."""
        if _is_shared(source, receiver):
            return replace(header, encoding=Encoding.SHARED_MEMORY, segment=source.segment), source
        if base is not None and Encoding.DELTA in receiver.encodings:
            delta = await self._delta(source, base)
            if delta is not None:
                encoded = BytesInMemory(source.manifest, memoryview(delta.data))
                return _delta_header(header, delta, base.version), encoded
        return header, source

    async def _delta(self, source: StateBytes, base: Base) -> Delta | None:
        base_bytes = await base.open()
        if base_bytes is None:
            return None
        try:
            is_possible = is_delta_possible(source.manifest, base_bytes.manifest)
            return await self._deltas.get(source, base_bytes) if is_possible else None
        finally:
            await base_bytes.close()


def _is_shared(source: StateBytes, receiver: ReceiverOptions) -> bool:
    """Return whether the receiver accepts the segment of the source."""
    segment = source.segment
    is_same_host = segment is not None and segment.host_id == receiver.host_id
    return is_same_host and Encoding.SHARED_MEMORY in receiver.encodings


def _delta_header(header: Header, delta: Delta, base_version: int) -> Header:
    return replace(
        header,
        encoding=Encoding.DELTA,
        base_version=base_version,
        delta_size_bytes=len(delta.data),
        encoded_digest=delta.digest,
    )


def _offset(header: Header, receiver: ReceiverOptions, field: str) -> int:
    """Return the position of the first chunk: the receiver's offset if it refers to these bytes, otherwise 0.

    Raises:
        InvalidField: The offset is beyond the end of the bytes.
    """
    digest = receiver.resume_digest or header.manifest.digest
    if header.encoding is Encoding.SHARED_MEMORY or digest != header.resume_digest:
        return 0
    if receiver.resume_offset > header.encoded_size_bytes:
        problem = f'must be at most {header.encoded_size_bytes}, got {receiver.resume_offset}'
        raise InvalidField(field, problem)
    return receiver.resume_offset


async def _chunks(header: Header, encoded: StateBytes) -> AsyncGenerator[StateChunk, None]:
    for begin in range(header.resume_offset, header.encoded_size_bytes, CHUNK_BYTES):
        data = await encoded.read(begin, CHUNK_BYTES)
        yield StateChunk(begin, data, chunk_checksum(data))
