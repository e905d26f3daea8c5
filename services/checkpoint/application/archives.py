"""Downloads of checkpoints as tar archives. A download can be resumed, and verified with the archive's digest."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime
from weakref import WeakValueDictionary

from blake3 import blake3

from twinkle.checkpoint_engine import CHUNK_BYTES, StateChunk, chunk_checksum
from twinkle_services.checkpoint.application.registry import Registry
from twinkle_services.checkpoint.domain import Checkpoint, CheckpointKey
from twinkle_services.checkpoint.ports import ByteSource
from twinkle_services.kit.errors import InvalidField

_MAX_CACHED_DIGESTS = 4096

_Identity = tuple[CheckpointKey, str, datetime]
"""Distinguishes an archive from the one that replaces it: key, digest of the state, and creation time."""


@dataclass(frozen=True)
class ArchivePiece:
    """A piece of a checkpoint's archive."""

    chunk: StateChunk
    archive_size_bytes: int
    digest: str
    """Hexadecimal blake3 digest of the complete archive."""


class Archives:
    """Reads checkpoints as tar archives of their PEFT folders."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._digests = ArchiveDigests()

    async def download(self, key: CheckpointKey, *, offset: int) -> AsyncGenerator[ArchivePiece, None]:
        """Yield an archive from byte `offset` on, with one piece in memory at a time.

        The checkpoint must belong to the key's tenant or be public.

        Raises:
            CheckpointNotFound: The checkpoint does not exist, or the tenant may not read it.
            InvalidField: The offset is larger than the archive.
            CheckpointDamaged: The files or the record of the checkpoint differ from the committed ones.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        found = self._registry.catalogue.readable_checkpoint(key, now=self._registry.now())
        source = await self._registry.store.open_archive(found)
        try:
            if offset > source.size_bytes:
                raise InvalidField('offset', f'is {offset}, must be at most {source.size_bytes}, the archive size')
            digest = await self._digests.digest_of(found, source)
            # A caller that already has all bytes receives one empty piece with the digest.
            for begin in range(offset, source.size_bytes, CHUNK_BYTES) or (offset,):
                data = await source.read(begin, CHUNK_BYTES)
                yield ArchivePiece(StateChunk(begin, data, chunk_checksum(data)), source.size_bytes, digest)
        finally:
            await source.close()


class ArchiveDigests:
    """Computes the digests of archives, and caches the most recently used ones.

    Concurrency: use it from one event loop only; concurrent calls for one archive share one computation.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[_Identity, str] = OrderedDict()
        self._locks: WeakValueDictionary[_Identity, asyncio.Lock] = WeakValueDictionary()

    async def digest_of(self, checkpoint: Checkpoint, source: ByteSource) -> str:
        """Return the hexadecimal blake3 digest of a checkpoint's archive.

        Args:
            checkpoint: The checkpoint.
            source: The checkpoint's archive; no other task may read it during the call.
        """
        identity = (checkpoint.key, checkpoint.digest, checkpoint.create_time)
        async with self._locks.setdefault(identity, asyncio.Lock()):
            if identity not in self._digests:
                self._digests[identity] = await _digest(source)
                if len(self._digests) > _MAX_CACHED_DIGESTS:
                    self._digests.popitem(last=False)
            self._digests.move_to_end(identity)
            return self._digests[identity]


async def _digest(source: ByteSource) -> str:
    hasher = blake3()
    for begin in range(0, source.size_bytes, CHUNK_BYTES):
        hasher.update(await source.read(begin, CHUNK_BYTES))
    return hasher.hexdigest()
