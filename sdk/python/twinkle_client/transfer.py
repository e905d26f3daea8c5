"""Resumable transfers of files in chunks with checksums."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO, cast

import xxhash

from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_client.errors import RetryableError

CHUNK_BYTES = 1 << 20
"""Chunk size with the highest throughput over gRPC."""
MAX_FAILURES = 20
"""Number of consecutive attempts without progress after which a transfer fails."""


def checksum(data: bytes) -> int:
    """Return the xxh3-64 hash of `data` as a signed integer, for `TensorChunk.checksum`."""
    return int.from_bytes(xxhash.xxh3_64_digest(data), 'big', signed=True)


async def file_chunks(
    path: Path, *, offset: int, chunk_bytes: int = CHUNK_BYTES
) -> AsyncIterator[tensor_pb2.TensorChunk]:
    """Yield the chunks of a file from `offset` to its end."""
    with await _open(path, 'rb') as file:
        file.seek(offset)
        while data := await asyncio.to_thread(file.read, chunk_bytes):
            yield tensor_pb2.TensorChunk(offset=offset, data=data, checksum=checksum(data))
            offset += len(data)


async def receive_file(path: Path, fetch: Callable[[int], AsyncIterator[tensor_pb2.TensorChunk]]) -> None:
    """Download a file, resuming after the bytes that `path` already contains.

    Args:
        path: Target file. It contains only verified bytes at any time.
        fetch: Yields the chunks in order from a given offset.

    Raises:
        Error: The download failed permanently.
        ValueError: A chunk was damaged repeatedly.
    """
    failures = 0
    with await _open(path, 'ab') as file:
        while failures < MAX_FAILURES:
            begin = file.tell()
            try:
                if await _append(file, fetch(begin)):
                    return
            except RetryableError:
                if failures + 1 == MAX_FAILURES:
                    raise
            failures = 0 if file.tell() > begin else failures + 1
        raise ValueError(f'{path.name}: the chunk at byte {file.tell()} was damaged {failures} times; retry later')


async def _open(path: Path, mode: str) -> BinaryIO:
    return cast(BinaryIO, await asyncio.to_thread(path.open, mode))


async def _append(file: BinaryIO, incoming: AsyncIterator[tensor_pb2.TensorChunk]) -> bool:
    """Append chunks until a chunk is damaged; return whether all chunks were intact."""
    async for chunk in incoming:
        if chunk.offset != file.tell() or chunk.checksum != checksum(chunk.data):
            return False
        file.write(chunk.data)
    return True
