"""Digests of archives, by which a download that was cut knows that it may go on, and that it is whole in the end."""

import asyncio
from collections import OrderedDict
from datetime import datetime
from weakref import WeakValueDictionary

from blake3 import blake3

from services.checkpoint.domain import Checkpoint, CheckpointKey
from services.checkpoint.ports import ByteSource
from twinkle.checkpoint_engine import CHUNK_BYTES

_REMEMBERED = 4096

_Identity = tuple[CheckpointKey, str, datetime]
"""What tells an archive from the one that replaces it."""


class ArchiveDigests:
    """Reads an archive through once, and remembers what came of it.

    Concurrency: of several that ask for the same one, the first reads.
    """

    def __init__(self) -> None:
        """Know none."""
        self._known: OrderedDict[_Identity, str] = OrderedDict()
        self._locks: WeakValueDictionary[_Identity, asyncio.Lock] = WeakValueDictionary()

    async def digest_of(self, checkpoint: Checkpoint, source: ByteSource) -> str:
        """Return blake3 of a checkpoint's archive, hexadecimal; `source` is that archive, and not read meanwhile."""
        identity = (checkpoint.key, checkpoint.digest, checkpoint.create_time)
        async with self._locks.setdefault(identity, asyncio.Lock()):
            if identity not in self._known:
                self._known[identity] = await _digest(source)
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
            self._known.move_to_end(identity)
            return self._known[identity]


async def _digest(source: ByteSource) -> str:
    hasher = blake3()
    for begin in range(0, source.size_bytes, CHUNK_BYTES):
        hasher.update(await source.read(begin, CHUNK_BYTES))
    return hasher.hexdigest()
