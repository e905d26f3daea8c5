"""Committing a state that has been written: store first, catalogue second, then the news.

Shared by publishing, uploading and copying, the ways a state comes in.
"""

from datetime import datetime

from services.checkpoint.application.announcements import Announcements
from services.checkpoint.application.evictions import Evictions
from services.checkpoint.application.exclusive import Exclusive
from services.checkpoint.application.frames import CheckpointTarget, Header, VersionTarget
from services.checkpoint.domain import (
    AdapterKey,
    AdapterVersion,
    Catalogue,
    Checkpoint,
    CheckpointKey,
    Record,
    VersionKey,
)
from services.checkpoint.ports import StateSource, StateStore, StateWriter
from services.kit import failpoints
from services.kit.clock import Clock
from twinkle.checkpoint_engine import CHUNK_BYTES, StateChunk, chunk_checksum

CHECKPOINTS = 'checkpoints'
"""Topic of the announcements of changed checkpoints; that of versions is the adapter's key."""


class CommitState:
    """Turns a written state into a version or a checkpoint."""

    def __init__(
        self,
        catalogue: Catalogue,
        store: StateStore,
        *,
        clock: Clock,
        announcements: Announcements,
        exclusive: Exclusive,
    ) -> None:
        """Use the ports and the service's shared objects."""
        self._catalogue = catalogue
        self._store = store
        self._clock = clock
        self._announcements = announcements
        self._exclusive = exclusive
        self._evictions = Evictions(store)

    def match(self, adapter: AdapterKey, header: Header) -> Record | None:
        """Return the record if this very state is here already; None if it may be written.

        Raises:
            VersionConflict, CheckpointExists: something else is here.
            QuotaExceeded: it asks to be pinned, and as many as may be are.
        """
        digest, target = header.manifest.digest, header.target
        if isinstance(target, VersionTarget):
            return self._catalogue.match_version(adapter, target.version, digest=digest, is_pinned=target.is_pinned)
        return self._catalogue.match_checkpoint(
            CheckpointKey(adapter, target.name),
            digest,
            is_overwrite_allowed=target.is_overwrite_allowed,
            now=self._clock.now(),
            request_id=target.request_id,
        )

    def begin(self, adapter: AdapterKey, header: Header) -> StateWriter:
        """Return a writer for the state that the header announces."""
        target = header.target
        if isinstance(target, VersionTarget):
            return self._store.begin(VersionKey(adapter, target.version), header.manifest)
        return self._store.begin(CheckpointKey(adapter, target.name), header.manifest)

    async def __call__(self, adapter: AdapterKey, header: Header, writer: StateWriter) -> Record:
        """Commit what was written, or return what another writer committed first, if it is the same.

        Raises:
            VersionConflict, CheckpointExists: another writer was first with something else.
            StreamOutOfOrder, DigestMismatch: what was written is not what was announced.
        """
        return await self._exclusive.run(adapter, lambda: self._commit(adapter, header, writer))

    async def copy_checkpoint(self, adapter: AdapterKey, header: Header, source: StateSource) -> Checkpoint:
        """Make a checkpoint of a state that can be read here already; the same again is the same checkpoint.

        Raises:
            CheckpointExists: something else is here.
        """
        record = self.match(adapter, header)
        if record is None:
            writer = self.begin(adapter, header)
            try:
                for begin in range(0, source.size_bytes, CHUNK_BYTES):
                    data = await source.read(begin, CHUNK_BYTES)
                    await writer.add(StateChunk(begin, data, chunk_checksum(data)))
                record = await self(adapter, header, writer)
            finally:
                await writer.discard()
        assert isinstance(record, Checkpoint)  # noqa: S101 (the target was one)
        return record

    async def _commit(self, adapter: AdapterKey, header: Header, writer: StateWriter) -> Record:
        known = self.match(adapter, header)
        if known is not None:
            return known
        now = self._clock.now()
        if isinstance(header.target, VersionTarget):
            version = _version(adapter, header, header.target, now)
            await writer.commit(version)
            evicted = self._catalogue.add_version(version)
            self._announcements.announce(adapter)
            failpoints.reach('weights.announced')
            self._evictions.add(evicted)
            return version
        checkpoint = _checkpoint(adapter, header, header.target, now, folder=writer.folder)
        await writer.commit(checkpoint)
        self._catalogue.put_checkpoint(checkpoint)
        self._announcements.announce(CHECKPOINTS)
        return checkpoint


def _version(adapter: AdapterKey, header: Header, target: VersionTarget, now: datetime) -> AdapterVersion:
    return AdapterVersion(
        adapter=adapter,
        version=target.version,
        digest=header.manifest.digest,
        size_bytes=header.manifest.size_bytes,
        is_pinned=target.is_pinned,
        create_time=now,
    )


def _checkpoint(
    adapter: AdapterKey, header: Header, target: CheckpointTarget, now: datetime, *, folder: str
) -> Checkpoint:
    return Checkpoint(
        key=CheckpointKey(adapter, target.name),
        base_model=header.manifest.base_model,
        is_optimizer_included=header.manifest.is_trainer_included,
        size_bytes=header.manifest.size_bytes,
        digest=header.manifest.digest,
        step_count=target.step_count,
        folder=folder,
        create_time=now,
        expire_time=None if target.ttl is None else now + target.ttl,
        request_id=target.request_id,
        user_metadata=target.user_metadata,
        lora_rank=0 if header.manifest.lora_config is None else header.manifest.lora_config.r,
    )
