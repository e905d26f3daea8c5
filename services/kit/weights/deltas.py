"""Deltas as a sender makes them: block by block off the event loop, and kept for the next who asks.

Many subscribers hold the same base when a version comes; they cost one encoding. Deltas are kept by
what they are made of, so nothing can be mixed up: equal digests are equal bytes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from blake3 import blake3

from services.kit.weights.state_bytes import StateBytes
from services.kit.worker import Threads
from twinkle.checkpoint_engine.delta import DeltaBlock, delta_blocks, encode_block

_TRIAL_BYTES = 32 << 20
"""After so much of a state an encoding that hardly saves is given up."""
_TRIAL_SHARE = 0.97


@dataclass(frozen=True)
class Delta:
    """An encoded delta."""

    data: bytes
    digest: str
    """blake3 of `data`."""


_Key = tuple[str, str]


class Deltas:
    """Makes deltas and keeps the newest ones.

    Concurrency: tasks that ask for the same delta wait for one encoding.
    """

    def __init__(self, threads: Threads, *, capacity_bytes: int) -> None:
        """Encode in `threads`; keep at most `capacity_bytes`, and the last delta in any case."""
        self._threads = threads
        self._capacity_bytes = capacity_bytes
        self._held: OrderedDict[_Key, Delta | None] = OrderedDict()
        self._locks: dict[_Key, tuple[asyncio.Lock, int]] = {}

    async def get(self, new: StateBytes, base: StateBytes) -> Delta | None:
        """Return the delta from `base` to `new`, of the same tensors; None where it is not smaller than `new`."""
        key = (base.manifest.digest, new.manifest.digest)
        async with self._alone(key):
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            delta = await self._encode(new, base)
            self._keep(key, delta)
            return delta

    async def _encode(self, new: StateBytes, base: StateBytes) -> Delta | None:
        limit = new.manifest.size_bytes
        parts: list[bytes] = []
        size = 0
        for block in delta_blocks(new.manifest):
            parts.append(await self._encode_block(block, new, base))
            size += len(parts[-1])
            is_hopeless = block.end >= _TRIAL_BYTES and size > _TRIAL_SHARE * block.end
            if size >= limit or is_hopeless:
                return None
        return await self._threads.run(_join, parts)

    async def _encode_block(self, block: DeltaBlock, new: StateBytes, base: StateBytes) -> bytes:
        ours = await new.read(block.offset, block.size_bytes)
        theirs = await base.read(block.offset, block.size_bytes)
        return await self._threads.run(encode_block, block, ours, theirs)

    def _keep(self, key: _Key, delta: Delta | None) -> None:
        self._held[key] = delta
        while len(self._held) > 1 and self._size_bytes() > self._capacity_bytes:
            self._held.popitem(last=False)

    def _size_bytes(self) -> int:
        # What came to nothing is kept, too: 1 KiB stands for the entry.
        return sum(1024 if delta is None else len(delta.data) for delta in self._held.values())

    @asynccontextmanager
    async def _alone(self, key: _Key) -> AsyncIterator[None]:
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
