"""A store that notes when each version was last opened, for the collection of what nobody uses."""

from datetime import datetime

from services.checkpoint.domain import AdapterVersion, CheckpointKey, NewestMark, Record, VersionKey
from services.checkpoint.ports import ByteSource, StateSource, StateStore, StateWriter
from services.kit.clock import Clock
from twinkle.checkpoint_engine import WeightManifest


class NotedStore:
    """Passes every call on to a store. See `StateStore` for what they do."""

    def __init__(self, store: StateStore, clock: Clock) -> None:
        """Note what is opened from now on."""
        self._store = store
        self._clock = clock
        self._begin = clock.now()
        self._last_use: dict[VersionKey, datetime] = {}

    def last_use(self, version: AdapterVersion) -> datetime:
        """Return when a version was published or last opened; what was before the start counts as at the start."""
        return max(self._last_use.get(version.key, self._begin), version.create_time)

    async def load(self) -> list[Record | NewestMark]:
        """Load."""
        return await self._store.load()

    def begin(self, key: VersionKey | CheckpointKey, manifest: WeightManifest) -> StateWriter:
        """Begin a state."""
        return self._store.begin(key, manifest)

    async def open_state(self, key: VersionKey | CheckpointKey, *, is_adapter_only: bool) -> StateSource:
        """Open a state, and note that it is used."""
        source = await self._store.open_state(key, is_adapter_only=is_adapter_only)
        if isinstance(key, VersionKey):
            self._last_use[key] = self._clock.now()
        return source

    async def open_archive(self, key: CheckpointKey) -> ByteSource:
        """Open an archive."""
        return await self._store.open_archive(key)

    async def update(self, record: Record) -> None:
        """Replace a record."""
        await self._store.update(record)

    async def mark_newest(self, mark: NewestMark) -> None:
        """Remember a number."""
        await self._store.mark_newest(mark)

    async def delete(self, key: VersionKey | CheckpointKey) -> None:
        """Delete a state."""
        if isinstance(key, VersionKey):
            self._last_use.pop(key, None)
        await self._store.delete(key)
