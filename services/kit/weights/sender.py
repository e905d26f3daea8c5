"""Sending a state to one who asks: the encoding that costs least, from the byte where a cut transfer ended."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from services.kit.errors import InvalidField
from services.kit.weights.deltas import Delta, Deltas
from services.kit.weights.frames import Commit, Encoding, Frame, Header
from services.kit.weights.state_bytes import HeldBytes, StateBytes
from services.kit.worker import Threads
from twinkle.checkpoint_engine import CHUNK_BYTES, StateChunk, chunk_checksum
from twinkle.checkpoint_engine.delta import is_delta_possible


@dataclass(frozen=True)
class Wanted:
    """What a receiver can take, and where a cut transfer of it ended."""

    encodings: frozenset[Encoding] = frozenset()
    """Beside WHOLE, which everyone takes."""
    host_id: str = ''
    """Of the memory it sees, for SHARED_MEMORY."""
    resume_offset: int = 0
    """Encoded bytes it has; 0 for none."""
    resume_digest: str = ''
    """Of what they are the beginning of. Empty: of the state itself."""


@dataclass(frozen=True)
class Base:
    """A version that the receiver holds, as the start of a delta."""

    version: int
    open: Callable[[], Awaitable[StateBytes | None]]
    """Opens its bytes; None where they are here no more."""


class Sender:
    """Turns states into frames. One for a whole service: what was encoded for one receiver serves the next.

    Concurrency: many transfers at once; each keeps one chunk, and a delta, in memory.
    """

    def __init__(self, threads: Threads, *, delta_bytes: int = 256 << 20) -> None:
        """Encode in `threads` and keep about `delta_bytes` of deltas."""
        self._deltas = Deltas(threads, capacity_bytes=delta_bytes)

    async def frames(
        self,
        header: Header,
        source: StateBytes,
        *,
        wanted: Wanted = Wanted(),
        base: Base | None = None,
        offset_field: str = 'resume_offset',
    ) -> AsyncGenerator[Frame, None]:
        """Yield the frames of a state.

        The next chunk is read when the receiver has taken the one before.

        Args:
            header: Says what the state is; how it is sent is filled in here.
            source: Its bytes; closed at the end, whatever the end is.
            wanted: What the receiver can take.
            base: What the receiver holds. Unset: nothing.
            offset_field: The request's field that holds the offset, for errors.

        Raises:
            InvalidField: the offset lies behind what is sent.
        """
        try:
            header, encoded = await self._encoded(header, source, wanted, base)
            header = header.resumed(_offset(header, wanted, offset_field))
            yield header
            async with aclosing(_chunks(header, encoded)) as chunks:
                async for chunk in chunks:
                    yield chunk
            yield Commit(header.manifest.digest)
        finally:
            await source.close()

    async def _encoded(
        self, header: Header, source: StateBytes, wanted: Wanted, base: Base | None
    ) -> tuple[Header, StateBytes]:
        """Return the header with the encoding chosen, and where the encoded bytes are."""
        segment = source.segment
        is_shared = segment is not None and segment.host_id == wanted.host_id
        if is_shared and Encoding.SHARED_MEMORY in wanted.encodings:
            return replace(header, encoding=Encoding.SHARED_MEMORY, segment=segment), source
        if base is not None and Encoding.DELTA in wanted.encodings:
            delta = await self._delta(source, base)
            if delta is not None:
                return _delta_header(header, delta, base.version), HeldBytes(source.manifest, memoryview(delta.data))
        return header, source

    async def _delta(self, source: StateBytes, base: Base) -> Delta | None:
        held = await base.open()
        if held is None:
            return None
        try:
            is_possible = is_delta_possible(source.manifest, held.manifest)
            return await self._deltas.get(source, held) if is_possible else None
        finally:
            await held.close()


def _delta_header(header: Header, delta: Delta, base_version: int) -> Header:
    return replace(
        header,
        encoding=Encoding.DELTA,
        base_version=base_version,
        delta_size_bytes=len(delta.data),
        encoded_digest=delta.digest,
    )


def _offset(header: Header, wanted: Wanted, field: str) -> int:
    """Return where the chunks begin: where the receiver's end, if they are of the same bytes."""
    digest = wanted.resume_digest or header.manifest.digest
    if header.encoding is Encoding.SHARED_MEMORY or digest != header.resume_digest:
        return 0
    if wanted.resume_offset > header.encoded_size_bytes:
        problem = f'is {wanted.resume_offset}, there are {header.encoded_size_bytes} bytes'
        raise InvalidField(field, problem)
    return wanted.resume_offset


async def _chunks(header: Header, encoded: StateBytes) -> AsyncGenerator[StateChunk, None]:
    for begin in range(header.resume_offset, header.encoded_size_bytes, CHUNK_BYTES):
        data = await encoded.read(begin, CHUNK_BYTES)
        yield StateChunk(begin, data, chunk_checksum(data))
