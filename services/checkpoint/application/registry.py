"""The registry of committed states combines the store, the catalogue that indexes it, and announcements of changes.

A change is written to the store first and applied to the catalogue second. New versions and all changes of checkpoints
are announced last. Changes of one adapter run one after the other, and each one runs to completion.
"""

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import TypeVar

import structlog

from twinkle.checkpoint_engine import CHUNK_BYTES, StateChunk, chunk_checksum
from twinkle_services.checkpoint.application.announcements import Announcements
from twinkle_services.checkpoint.application.evictions import Evictions
from twinkle_services.checkpoint.application.exclusive import Exclusive
from twinkle_services.checkpoint.application.tracked_store import TrackedStore
from twinkle_services.checkpoint.domain import (
    AdapterKey,
    AdapterVersion,
    Catalogue,
    Checkpoint,
    CheckpointKey,
    Record,
    VersionKey,
)
from twinkle_services.checkpoint.ports import StateSource, StateStore, StateWriter
from twinkle_services.kit import failpoints
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.weights import CheckpointTarget, Header, VersionTarget

CHECKPOINTS = 'checkpoints'
"""Topic of the announcements of changed checkpoints; the topic of new versions is the adapter's key."""
_Result = TypeVar('_Result')
_log = structlog.get_logger('registry')


class Registry:
    """Committed versions and checkpoints of all tenants.

    Concurrency: use it from one event loop only. Callers may read `catalogue` and `store` at any time, and change them
    only within `change`.
    """

    def __init__(self, catalogue: Catalogue, store: StateStore, clock: Clock) -> None:
        """Create a registry.

        Args:
            catalogue: Index of the states in `store`.
            store: Stores states and their records.
            clock: Clock that determines which checkpoints have expired.
        """
        self.catalogue = catalogue
        self.store = TrackedStore(store, clock)
        self.announcements = Announcements()
        """Announces changes to the streams that follow them; closed when the service shuts down."""
        self._clock = clock
        self._exclusive = Exclusive()
        self._evictions = Evictions(self.store)

    def now(self) -> datetime:
        """Return the current time of the service's clock."""
        return self._clock.now()

    async def change(self, adapter: AdapterKey, change: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run a change of an adapter's states after all earlier ones; see `Exclusive.run`."""
        return await self._exclusive.run(adapter, change)

    async def clean_up(self, deletions: Iterable[tuple[AdapterKey, Callable[[], Awaitable[int]]]]) -> int:
        """Run deletions one after the other, each as a change of its adapter, and return the number of deleted states.

        A deletion that fails, for example because the disk is read-only, is logged and does not prevent the others. The
        next cleanup repeats it.
        """
        count, failures = 0, list[DomainError]()
        for adapter, deletion in deletions:
            try:
                count += await self.change(adapter, deletion)
            except DomainError as error:
                failures.append(error)
        if failures:
            _log.warning('cleanup incomplete', failures=len(failures), error=str(failures[0]))
        return count

    def match(self, adapter: AdapterKey, header: Header) -> Record | None:
        """Return the record of the announced state if it is already committed; None if it may be written.

        Raises:
            VersionConflict, CheckpointExists: Another state is committed under the same key, or a newer version exists.
            CheckpointDamaged: The record under the same key cannot be read, and overwriting is not allowed.
            QuotaExceeded: The request pins the version, and the adapter has the maximum number of pins.
        """
        digest, target = header.manifest.digest, header.target
        if isinstance(target, VersionTarget):
            return self.catalogue.match_version(adapter, target.version, digest=digest, is_pinned=target.is_pinned)
        return self.catalogue.match_checkpoint(
            CheckpointKey(adapter, target.name),
            digest,
            is_overwrite_allowed=target.is_overwrite_allowed,
            now=self._clock.now(),
            request_id=target.request_id,
        )

    def begin(self, adapter: AdapterKey, header: Header) -> StateWriter:
        """Return a writer for the announced state."""
        target = header.target
        if isinstance(target, VersionTarget):
            return self.store.begin(VersionKey(adapter, target.version), header.manifest)
        return self.store.begin(CheckpointKey(adapter, target.name), header.manifest)

    async def commit(self, adapter: AdapterKey, header: Header, writer: StateWriter) -> Record:
        """Commit a written state, or return the record of the same state if another writer committed it first.

        Raises:
            VersionConflict, CheckpointExists, CheckpointDamaged, QuotaExceeded: See `match`; another writer may have
                committed a state since then.
            StreamOutOfOrder, DigestMismatch: Bytes are missing, or they do not match the announced digest.
            DiskFull, StoreUnavailable: The disk has too little space, or cannot be used at the moment.
        """
        return await self.change(adapter, lambda: self._commit(adapter, header, writer))

    async def copy_in(self, adapter: AdapterKey, header: Header, source: StateSource) -> Checkpoint:
        """Commit the state in `source` as a checkpoint, or return the existing checkpoint if it has the same state.

        Raises:
            CheckpointExists: A different state is committed under the same name.
            CheckpointDamaged: The record of the checkpoint with this name cannot be read.
            DiskFull, StoreUnavailable: The disk has too little space, or cannot be used at the moment.
        """
        record = self.match(adapter, header)
        if record is None:
            writer = self.begin(adapter, header)
            try:
                for begin in range(0, source.size_bytes, CHUNK_BYTES):
                    data = await source.read(begin, CHUNK_BYTES)
                    await writer.add(StateChunk(begin, data, chunk_checksum(data)))
                record = await self.commit(adapter, header, writer)
            finally:
                await writer.discard()
        assert isinstance(record, Checkpoint)  # noqa: S101 (the header's target is a checkpoint)
        return record

    async def put_version(self, version: AdapterVersion) -> None:
        """Replace the record of a version, and delete versions that exceed `ring_capacity`; call within `change`."""
        await self.store.update(version)
        self._evictions.add(self.catalogue.add_version(version))

    async def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the record of a checkpoint; call within `change`."""
        await self.store.update(checkpoint)
        self.catalogue.put_checkpoint(checkpoint)
        self.announcements.announce(CHECKPOINTS)

    async def remove_checkpoint(self, key: CheckpointKey) -> None:
        """Delete a checkpoint; call within `change`."""
        await self.store.delete(key)
        self.catalogue.remove_checkpoint(key)
        self.announcements.announce(CHECKPOINTS)

    async def _commit(self, adapter: AdapterKey, header: Header, writer: StateWriter) -> Record:
        known = self.match(adapter, header)
        if known is not None:
            return known
        now = self._clock.now()
        if isinstance(header.target, VersionTarget):
            version = _version(adapter, header, header.target, now)
            await writer.commit(version)
            evicted = self.catalogue.add_version(version)
            self.announcements.announce(adapter)
            failpoints.reach('weights.announced')
            self._evictions.add(evicted)
            return version
        checkpoint = _checkpoint(adapter, header, header.target, now, folder=writer.folder)
        await writer.commit(checkpoint)
        self.catalogue.put_checkpoint(checkpoint)
        self.announcements.announce(CHECKPOINTS)
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
    config = header.manifest.lora_config
    targets = () if config is None else config.target_modules
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
        lora_rank=0 if config is None else config.r,
        target_modules=(targets,) if isinstance(targets, str) else targets,
    )
