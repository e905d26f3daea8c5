"""Splitting of a byte sequence into chunks that fit a message, each with a checksum.

Chunks can start at any byte, so an interrupted transfer can be resumed. The `assembler` module joins chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

CHUNK_BYTES = 1 << 20
"""Size of a chunk. gRPC streams are fastest with 1 MiB; with 4 MiB the throughput is a third lower."""


@dataclass(frozen=True)
class StateChunk:
    """A part of a byte sequence."""

    offset: int
    """Offset of `data` in the sequence, in bytes."""
    data: bytes | memoryview
    checksum: int
    """xxh3-64 of `data` as a signed integer with the same bits."""


def chunk_checksum(data: bytes | bytearray | memoryview) -> int:
    """Return xxh3-64 of `data` as a signed 64-bit integer with the same bits."""
    unsigned = xxhash.xxh3_64_intdigest(data)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def iter_chunks(data: bytes | memoryview, *, offset: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[StateChunk]:
    """Yield the chunks of `data` from `offset` to the end, in order.

    Args:
        data: the complete sequence. The chunks are views of it.
        offset: first byte to yield. If it equals the length of `data`, there are no chunks.
        chunk_bytes: size of each chunk except the last; at least 1.

    Raises:
        ValueError: `offset` is outside `data`, or `chunk_bytes` is not positive.
    """
    if not 0 <= offset <= len(data):
        raise ValueError(f'offset must be from 0 to {len(data)}, got {offset}')
    if chunk_bytes < 1:
        raise ValueError(f'chunk_bytes must be at least 1, got {chunk_bytes}')
    view = memoryview(data)
    for begin in range(offset, len(view), chunk_bytes):
        part = view[begin : begin + chunk_bytes]
        yield StateChunk(begin, part, chunk_checksum(part))
