"""A cache of deltas between states, encoded block by block outside the event loop.

Many subscribers have the same base when a version is published, so one encoding serves all of them. The keys are the
digests of both states.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from blake3 import blake3

from twinkle.checkpoint_engine.delta import DeltaBlock, delta_blocks, encode_block
from twinkle_services.kit.weights.state_bytes import StateBytes
from twinkle_services.kit.worker import Threads

_TRIAL_BYTES = 32 << 20
"""Encoding stops once at least this many bytes are encoded and the delta exceeds `_TRIAL_SHARE` of them."""
_TRIAL_SHARE = 0.97


@dataclass(frozen=True)
class Delta:
    """An encoded delta."""

    data: bytes
    digest: str
    """blake3 digest of `data`, hexadecimal."""


_Key = tuple[str, str]


class Deltas:
    """Encodes deltas and caches the most recently used ones.

    Concurrency: tasks that need the same delta share one encoding.
    """

    def __init__(self, threads: Threads, *, capacity_bytes: int) -> None:
        """Encode in `threads` and cache up to `capacity_bytes`; the newest delta is always cached."""
        self._threads = threads
        self._capacity_bytes = capacity_bytes
        self._cached: OrderedDict[_Key, Delta | None] = OrderedDict()
        self._locks: dict[_Key, tuple[asyncio.Lock, int]] = {}

    async def get(self, new: StateBytes, base: StateBytes) -> Delta | None:
        """Return the delta from `base` to `new`, or None if it would save too few bytes.

        Both states must have the same tensors.
        """
        key = (base.manifest.digest, new.manifest.digest)
        async with self._locked(key):
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
            delta = await self._encode(new, base)
            self._store(key, delta)
            return delta

    async def _encode(self, new: StateBytes, base: StateBytes) -> Delta | None:
        limit = new.manifest.size_bytes
        parts: list[bytes] = []
        size = 0
        for block in delta_blocks(new.manifest):
            parts.append(await self._encode_block(block, new, base))
            size += len(parts[-1])
            is_too_large = block.end >= _TRIAL_BYTES and size > _TRIAL_SHARE * block.end
            if size >= limit or is_too_large:
                return None
        return await self._threads.run(_join, parts)

    async def _encode_block(self, block: DeltaBlock, new: StateBytes, base: StateBytes) -> bytes:
        new_bytes = await new.read(block.offset, block.size_bytes)
        base_bytes = await base.read(block.offset, block.size_bytes)
        return await self._threads.run(encode_block, block, new_bytes, base_bytes)

    def _store(self, key: _Key, delta: Delta | None) -> None:
        self._cached[key] = delta
        while len(self._cached) > 1 and self._size_bytes() > self._capacity_bytes:
            self._cached.popitem(last=False)

    def _size_bytes(self) -> int:
        # Results without a delta are cached, too, and count as 1 KiB.
        return sum(1024 if delta is None else len(delta.data) for delta in self._cached.values())

    @asynccontextmanager
    async def _locked(self, key: _Key) -> AsyncIterator[None]:
        lock, count = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, count + 1)
        try:
            async with lock:
                yield
        finally:
            lock, count = self._locks.pop(key)
            if count > 1:
                self._locks[key] = (lock, count - 1)


def _join(parts: list[bytes]) -> Delta | None:
    data = b''.join(parts)
    return Delta(data, blake3(data).hexdigest())
