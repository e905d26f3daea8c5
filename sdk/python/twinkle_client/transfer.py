"""Files over the wire: checked chunks up, checked chunks down, both resumable."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO, cast

import xxhash

from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_client.errors import RetryableError

CHUNK_BYTES = 1 << 20
"""gRPC moves 1 MiB messages fastest."""
MAX_FAILURES = 20
"""Cut transfers without any progress before giving up."""


def checksum(data: bytes) -> int:
    """Return xxh3-64 of `data` as a signed integer, as `TensorChunk.checksum` wants it."""
    return int.from_bytes(xxhash.xxh3_64_digest(data), 'big', signed=True)


async def file_chunks(
    path: Path, *, offset: int, chunk_bytes: int = CHUNK_BYTES
) -> AsyncIterator[tensor_pb2.TensorChunk]:
    """Yield the chunks of a file from `offset` on; nothing once that is its end."""
    with await _open(path, 'rb') as file:
        file.seek(offset)
        while data := await asyncio.to_thread(file.read, chunk_bytes):
            yield tensor_pb2.TensorChunk(offset=offset, data=data, checksum=checksum(data))
            offset += len(data)


async def receive_file(path: Path, fetch: Callable[[int], AsyncIterator[tensor_pb2.TensorChunk]]) -> None:
    """Write what `fetch` yields to `path`; a file that is there already is gone on with.

    Args:
        path: the file; holds nothing but a correct beginning at any time.
        fetch: yields chunks in order from the given offset on.

    Raises:
        Error: fetching failed for good.
        ValueError: a chunk came damaged again and again.
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
        raise ValueError(f'{path.name}: the chunk at byte {file.tell()} came damaged {failures} times')


async def _open(path: Path, mode: str) -> BinaryIO:
    return cast(BinaryIO, await asyncio.to_thread(path.open, mode))


async def _append(file: BinaryIO, incoming: AsyncIterator[tensor_pb2.TensorChunk]) -> bool:
    """Append chunks while they are right; return whether all were."""
    async for chunk in incoming:
        if chunk.offset != file.tell() or chunk.checksum != checksum(chunk.data):
            return False
        file.write(chunk.data)
    return True
