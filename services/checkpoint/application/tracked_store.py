"""A store that records when each version was last opened, so that unused versions can be deleted."""

from datetime import datetime

from twinkle.checkpoint_engine import WeightManifest
from twinkle_services.checkpoint.domain import (
    AdapterVersion,
    Checkpoint,
    CheckpointKey,
    DamagedState,
    NewestMark,
    Record,
    VersionKey,
)
from twinkle_services.checkpoint.ports import ByteSource, StateSource, StateStore, StateWriter
from twinkle_services.kit.clock import Clock


class TrackedStore:
    """Implements `StateStore` by delegating every call to another store."""

    def __init__(self, store: StateStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._start_time = clock.now()
        self._last_use: dict[VersionKey, datetime] = {}

    def last_use(self, version: AdapterVersion) -> datetime:
        """Return the latest of three times: publication, last opening, and start of the service."""
        return max(self._last_use.get(version.key, self._start_time), version.create_time)

    async def load(self) -> list[Record | NewestMark | DamagedState]:
        return await self._store.load()

    def begin(self, key: VersionKey | CheckpointKey, manifest: WeightManifest) -> StateWriter:
        return self._store.begin(key, manifest)

    async def open_state(self, key: VersionKey | CheckpointKey, *, is_adapter_only: bool) -> StateSource:
        source = await self._store.open_state(key, is_adapter_only=is_adapter_only)
        if isinstance(key, VersionKey):
            self._last_use[key] = self._clock.now()
        return source

    async def open_archive(self, checkpoint: Checkpoint) -> ByteSource:
        return await self._store.open_archive(checkpoint)

    async def update(self, record: Record) -> None:
        await self._store.update(record)

    async def mark_newest(self, mark: NewestMark) -> None:
        await self._store.mark_newest(mark)

    async def delete(self, key: VersionKey | CheckpointKey) -> None:
        if isinstance(key, VersionKey):
            self._last_use.pop(key, None)
        await self._store.delete(key)
