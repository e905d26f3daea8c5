"""Get, list and download checkpoints."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from services.checkpoint.application.archive_digests import ArchiveDigests
from services.checkpoint.domain import Catalogue, Checkpoint, CheckpointKey
from services.checkpoint.ports import StateStore
from services.kit.caller import Caller
from services.kit.clock import Clock
from services.kit.errors import InvalidField
from services.kit.paging import Page, SortKey
from twinkle.checkpoint_engine import CHUNK_BYTES, StateChunk, chunk_checksum


class GetCheckpoint:
    """Finds one checkpoint."""

    def __init__(self, catalogue: Catalogue, clock: Clock) -> None:
        """Use the catalogue; `clock` tells which have expired."""
        self._catalogue = catalogue
        self._clock = clock

    async def __call__(self, key: CheckpointKey) -> Checkpoint:
        """Return a checkpoint of the key's tenant, or a public one; where another tenant's lies is nobody's business.

        Raises:
            CheckpointNotFound: it is not here.
        """
        found = self._catalogue.readable_checkpoint(key, now=self._clock.now())
        return found if found.key == key else replace(found, folder='', user_metadata={})


class ListCheckpoints:
    """Lists a tenant's checkpoints."""

    def __init__(self, catalogue: Catalogue, clock: Clock) -> None:
        """Use the catalogue; `clock` tells which have expired."""
        self._catalogue = catalogue
        self._clock = clock

    async def __call__(self, caller: Caller, page: Page, *, adapter_id: str) -> tuple[list[Checkpoint], SortKey | None]:
        """Return a page, newest first, and the sort key of its last checkpoint if more follow.

        Args:
            caller: Whose checkpoints.
            page: Which of them.
            adapter_id: Only of this run; empty for all.
        """
        found = self._catalogue.checkpoints(caller.tenant_id, adapter_id=adapter_id, now=self._clock.now())
        rest = [checkpoint for checkpoint in found if page.after is None or _sort_key(checkpoint) < page.after]
        items = rest[: page.size]
        return items, _sort_key(items[-1]) if len(rest) > page.size else None


@dataclass(frozen=True)
class ArchivePiece:
    """A piece of a checkpoint's archive."""

    chunk: StateChunk
    archive_size_bytes: int
    digest: str
    """blake3 of the whole archive, hexadecimal."""


class DownloadCheckpoint:
    """Sends a checkpoint as a tar archive of its peft folder."""

    def __init__(self, catalogue: Catalogue, store: StateStore, clock: Clock) -> None:
        """Use the catalogue's records and the store's bytes."""
        self._catalogue = catalogue
        self._store = store
        self._clock = clock
        self._digests = ArchiveDigests()

    async def __call__(self, key: CheckpointKey, *, offset: int) -> AsyncGenerator[ArchivePiece, None]:
        """Yield the archive from a byte on, of the key's tenant or public; one piece is in memory at a time.

        Raises:
            CheckpointNotFound: it is not here.
            InvalidField: the offset lies behind the archive.
        """
        found = self._catalogue.readable_checkpoint(key, now=self._clock.now())
        source = await self._store.open_archive(found.key)
        try:
            if offset > source.size_bytes:
                raise InvalidField('offset', f'is {offset}, the archive has {source.size_bytes} bytes')
            digest = await self._digests.digest_of(found, source)
            # What is all there already is answered with one empty piece, which tells the digest.
            for begin in range(offset, source.size_bytes, CHUNK_BYTES) or (offset,):
                data = await source.read(begin, CHUNK_BYTES)
                yield ArchivePiece(StateChunk(begin, data, chunk_checksum(data)), source.size_bytes, digest)
        finally:
            await source.close()


def _sort_key(checkpoint: Checkpoint) -> SortKey:
    return checkpoint.create_time.isoformat(timespec='microseconds'), checkpoint.key.checkpoint_id
