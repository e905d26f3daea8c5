"""A byte sequence cut into checked pieces that fit a message.

Cutting may begin at any byte, so a transfer that was cut off goes on where it ended. Putting
the pieces together again is `assembler`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk. gRPC streams fastest with 1 MiB; at 4 MiB its throughput falls by a third."""


@dataclass(frozen=True)
class StateChunk:
    """A piece of a byte sequence."""

    offset: int
    """Where `data` begins in the whole sequence, in bytes."""
    data: bytes | memoryview
    """The piece itself."""
    checksum: int
    """xxh3-64 of `data` as a signed integer with the same bits."""


def chunk_checksum(data: bytes | bytearray | memoryview) -> int:
    """Return xxh3-64 of `data` as a signed 64-bit integer with the same bits."""
    unsigned = xxhash.xxh3_64_intdigest(data)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def iter_chunks(data: bytes | memoryview, *, offset: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[StateChunk]:
    """Yield `data` from `offset` on in chunks, in order.

    Args:
        data: The whole sequence. The chunks are views of it.
        offset: First byte to yield; the length of `data` yields nothing.
        chunk_bytes: Bytes of each chunk but the last; at least 1.

    Raises:
        ValueError: `offset` lies outside `data`, or `chunk_bytes` is not positive.
    """
    if not 0 <= offset <= len(data):
        raise ValueError(f'offset {offset} lies outside a sequence of {len(data)} bytes')
    if chunk_bytes < 1:
        raise ValueError(f'chunk_bytes has to be at least 1, got {chunk_bytes}')
    view = memoryview(data)
    for begin in range(offset, len(view), chunk_bytes):
        piece = view[begin : begin + chunk_bytes]
        yield StateChunk(begin, piece, chunk_checksum(piece))
