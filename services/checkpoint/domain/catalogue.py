"""The in-memory index of all committed versions and checkpoints by tenant, and the log of changed checkpoints.

The application writes to the store first and to the catalogue second, so that every entry of the catalogue is
committed.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime

from twinkle_services.checkpoint.domain.change_log import ChangeLog
from twinkle_services.checkpoint.domain.errors import CheckpointExists
from twinkle_services.checkpoint.domain.keys import AdapterKey, CheckpointKey, VersionKey
from twinkle_services.checkpoint.domain.records import AdapterVersion, Checkpoint, DamagedState, NewestMark, Record
from twinkle_services.checkpoint.domain.version_ring import VersionRing
from twinkle_services.kit.errors import AdapterNotFound, CheckpointDamaged, CheckpointNotFound

_DELETION_LIMIT = 10_000
"""Maximum number of deletions in the log of changes."""


class Catalogue:
    """Finds states by tenant. A state of another tenant is reported as missing, unless it is a public checkpoint."""

    def __init__(self, *, ring_capacity: int, pin_limit: int) -> None:
        """Create an empty catalogue.

        Args:
            ring_capacity: Maximum number of unpinned versions of an adapter, at least 1.
            pin_limit: Maximum number of pinned versions of an adapter.
        """
        self._ring_capacity = ring_capacity
        self._pin_limit = pin_limit
        self._rings: dict[AdapterKey, VersionRing] = {}
        self._checkpoints: dict[str, dict[CheckpointKey, Checkpoint]] = {}
        self._damaged: set[CheckpointKey] = set()
        """Checkpoints whose records cannot be read."""
        self._public: dict[str, CheckpointKey] = {}
        self.changes = ChangeLog(deletion_limit=_DELETION_LIMIT)

    def restore(self, stored: Iterable[Record | NewestMark | DamagedState]) -> list[AdapterVersion]:
        """Add the content of a store, and return the versions in excess of `ring_capacity`. Call this method first."""
        evicted: list[AdapterVersion] = []
        records: list[Record] = []
        for item in stored:
            if isinstance(item, NewestMark):
                self._ensure_ring(item.adapter).skip(item.version)
            elif isinstance(item, DamagedState):
                self._add_damaged(item.key)
            else:
                records.append(item)
        for record in sorted(records, key=lambda record: record.create_time):
            if isinstance(record, Checkpoint):
                self.put_checkpoint(record)
            else:
                evicted += self.add_version(record)
        return evicted

    def ring(self, adapter: AdapterKey) -> VersionRing:
        """Return an adapter's versions.

        Raises:
            AdapterNotFound: The adapter has no version, or only versions whose records cannot be read.
        """
        ring = self._rings.get(adapter)
        if ring is None or ring.newest is None:
            raise AdapterNotFound(adapter.adapter_id)
        return ring

    def match_version(
        self, adapter: AdapterKey, version: int, *, digest: str, is_pinned: bool
    ) -> AdapterVersion | None:
        """Return the version if it exists with the same digest; None if it may be added.

        Raises:
            VersionConflict: The number is not higher than all earlier ones, and the ring has no version with this
                number and digest.
            QuotaExceeded: The request pins the version, and the adapter has the maximum number of pins.
        """
        return (self._rings.get(adapter) or self._new_ring(adapter)).match(version, digest, is_pinned=is_pinned)

    def add_version(self, version: AdapterVersion) -> list[AdapterVersion]:
        """Add a version and return the versions that it evicts, oldest first."""
        return self._ensure_ring(version.adapter).add(version)

    def stored_bytes(self) -> dict[str, int]:
        """Return the total size of all versions and of all checkpoints, under 'version' and 'checkpoint'."""
        versions = [version for ring in self._rings.values() for version in ring.all_newest_first()]
        return {
            'version': sum(version.size_bytes for version in versions),
            'checkpoint': sum(checkpoint.size_bytes for checkpoint in self.all_checkpoints()),
        }

    def adapters(self) -> list[AdapterKey]:
        """Return every adapter that has versions."""
        return [adapter for adapter, ring in self._rings.items() if ring.newest is not None]

    def checkpoint(self, key: CheckpointKey, *, now: datetime) -> Checkpoint:
        """Return a checkpoint.

        Raises:
            CheckpointNotFound: The checkpoint does not exist or has expired.
            CheckpointDamaged: The record of the checkpoint cannot be read.
        """
        if key in self._damaged:
            raise CheckpointDamaged(key.checkpoint_id)
        found = self.find(key)
        if found is None or found.is_expired(now):
            raise CheckpointNotFound(key.checkpoint_id)
        return found

    def readable_checkpoint(self, key: CheckpointKey, *, now: datetime) -> Checkpoint:
        """Return a checkpoint of the key's tenant, or a public one of another tenant with the same run and name.

        Raises:
            CheckpointNotFound: There is no such checkpoint, or it has expired.
            CheckpointDamaged: The record of the tenant's checkpoint cannot be read.
        """
        if key in self._damaged or self.exists(key, now=now):
            return self.checkpoint(key, now=now)
        return self.checkpoint(self._public.get(key.checkpoint_id, key), now=now)

    def is_public_elsewhere(self, key: CheckpointKey, *, now: datetime) -> bool:
        """Return whether another tenant has a public checkpoint with the same run and name."""
        public = self._public.get(key.checkpoint_id, key)
        return public != key and self.exists(public, now=now)

    def match_checkpoint(
        self, key: CheckpointKey, digest: str, *, is_overwrite_allowed: bool, now: datetime, request_id: str = ''
    ) -> Checkpoint | None:
        """Return the checkpoint if it exists with the same digest and request id; None if it may be written.

        If the checkpoint or the new request has no request id, only the digests are compared.

        Raises:
            CheckpointExists: The checkpoint exists with a different digest or request id, and overwriting is not
                allowed.
            CheckpointDamaged: The checkpoint's record cannot be read, and overwriting is not allowed.
        """
        try:
            found = self.checkpoint(key, now=now)
        except CheckpointNotFound:
            return None
        except CheckpointDamaged:
            if is_overwrite_allowed:
                return None
            raise
        is_same_request = not request_id or not found.request_id or request_id == found.request_id
        if found.digest == digest and is_same_request:
            return found
        if not is_overwrite_allowed:
            raise CheckpointExists(key.checkpoint_id)
        return None

    def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add or replace a checkpoint."""
        self._damaged.discard(checkpoint.key)
        self._checkpoints.setdefault(checkpoint.key.adapter.tenant_id, {})[checkpoint.key] = checkpoint
        self._index_public(checkpoint.key, is_public=checkpoint.is_public)
        self.changes.record(checkpoint.key, is_deletion=False)

    def damaged_checkpoints(self) -> list[CheckpointKey]:
        """Return the checkpoints whose records cannot be read."""
        return list(self._damaged)

    def is_damaged(self, key: VersionKey | CheckpointKey) -> bool:
        """Return whether the record of a version or checkpoint cannot be read."""
        if isinstance(key, CheckpointKey):
            return key in self._damaged
        ring = self._rings.get(key.adapter)
        return ring is not None and ring.is_damaged(key.version)

    def highest_version(self, adapter: AdapterKey) -> int:
        """Return the highest version number that an adapter has used; 0 if it has used none."""
        ring = self._rings.get(adapter)
        return 0 if ring is None else ring.highest

    def remove_version(self, key: VersionKey) -> None:
        """Remove a version, damaged or not; its number is not reused."""
        self._rings[key.adapter].remove(key.version)

    def remove_checkpoint(self, key: CheckpointKey) -> None:
        """Remove a checkpoint, damaged or not."""
        if key in self._damaged:
            self._damaged.remove(key)
        else:
            tenant_checkpoints = self._checkpoints[key.adapter.tenant_id]
            del tenant_checkpoints[key]
            if not tenant_checkpoints:
                del self._checkpoints[key.adapter.tenant_id]
        self._index_public(key, is_public=False)
        self.changes.record(key, is_deletion=True)

    def checkpoints(self, tenant_id: str, *, adapter_id: str, now: datetime) -> list[Checkpoint]:
        """Return a tenant's checkpoints, newest first; an empty `adapter_id` selects all adapters."""
        found = [
            checkpoint
            for key, checkpoint in self._checkpoints.get(tenant_id, {}).items()
            if adapter_id in ('', key.adapter.adapter_id) and not checkpoint.is_expired(now)
        ]
        return sorted(
            found, key=lambda checkpoint: (checkpoint.create_time, checkpoint.key.checkpoint_id), reverse=True
        )

    def exists(self, key: CheckpointKey, *, now: datetime) -> bool:
        """Return whether a checkpoint exists and has not expired."""
        found = self.find(key)
        return found is not None and not found.is_expired(now)

    def is_expired(self, key: CheckpointKey, *, now: datetime) -> bool:
        """Return whether a checkpoint has expired but has not been deleted yet."""
        found = self.find(key)
        return found is not None and found.is_expired(now)

    def find(self, key: CheckpointKey) -> Checkpoint | None:
        """Return a checkpoint, expired or not; None if it does not exist."""
        return self._checkpoints.get(key.adapter.tenant_id, {}).get(key)

    def all_checkpoints(self) -> Iterator[Checkpoint]:
        """Yield the checkpoints of all tenants, in no particular order."""
        for tenant_checkpoints in self._checkpoints.values():
            yield from tenant_checkpoints.values()

    def _add_damaged(self, key: VersionKey | CheckpointKey) -> None:
        if isinstance(key, VersionKey):
            self._ensure_ring(key.adapter).mark_damaged(key.version)
        else:
            self._damaged.add(key)

    def _index_public(self, key: CheckpointKey, *, is_public: bool) -> None:
        if is_public:
            self._public[key.checkpoint_id] = key
        elif self._public.get(key.checkpoint_id) == key:
            del self._public[key.checkpoint_id]

    def _ensure_ring(self, adapter: AdapterKey) -> VersionRing:
        return self._rings.setdefault(adapter, self._new_ring(adapter))

    def _new_ring(self, adapter: AdapterKey) -> VersionRing:
        return VersionRing(adapter, capacity=self._ring_capacity, pin_limit=self._pin_limit)
