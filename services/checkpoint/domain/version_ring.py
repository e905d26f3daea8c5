"""The versions of one adapter: the newest ones up to a capacity, and the pinned ones.

The newest version is never evicted, so that version numbers continue to ascend after a restart. If the newest version
is deleted, because it is unused or its adapter was deleted, its number is recorded first.
"""

from dataclasses import replace

from twinkle_services.checkpoint.domain.errors import VersionConflict
from twinkle_services.checkpoint.domain.keys import AdapterKey
from twinkle_services.checkpoint.domain.records import AdapterVersion
from twinkle_services.kit.errors import CheckpointDamaged, InUse, QuotaExceeded, VersionNotFound


class VersionRing:
    """Versions of one adapter, ordered by number.

    A version is damaged if its stored record cannot be read. Damaged versions are neither listed nor counted.
    """

    def __init__(self, adapter: AdapterKey, *, capacity: int, pin_limit: int) -> None:
        """Create an empty ring.

        Args:
            adapter: Adapter to which the versions belong.
            capacity: Maximum number of unpinned versions, at least 1.
            pin_limit: Maximum number of pinned versions.
        """
        self._adapter = adapter
        self._capacity = capacity
        self._pin_limit = pin_limit
        self._versions: dict[int, AdapterVersion] = {}
        self._highest = 0
        self._damaged: set[int] = set()

    @property
    def newest(self) -> AdapterVersion | None:
        """Undamaged version with the highest number; None if the ring has no undamaged version."""
        return self._versions[max(self._versions)] if self._versions else None

    @property
    def highest(self) -> int:
        """Highest version number that was ever used; 0 if no number was used."""
        return self._highest

    def all_newest_first(self) -> list[AdapterVersion]:
        """Return all undamaged versions, highest number first."""
        return [self._versions[number] for number in sorted(self._versions, reverse=True)]

    def has(self, version: int) -> bool:
        """Return whether a version is in the ring."""
        return version in self._versions

    def get(self, version: int) -> AdapterVersion:
        """Return a version; 0 selects the newest one.

        Raises:
            VersionNotFound: The version was never published, or was evicted or deleted.
            CheckpointDamaged: The version's record cannot be read.
        """
        if version in self._damaged:
            raise CheckpointDamaged(f'{self._adapter.adapter_id} version {version}')
        found = self._versions.get(version) if version else self.newest
        if found is None:
            raise VersionNotFound(self._adapter.adapter_id, version)
        return found

    def match(self, version: int, digest: str, *, is_pinned: bool) -> AdapterVersion | None:
        """Return the version if it is in the ring with the same digest; None if it may be added.

        Raises:
            VersionConflict: The number is not higher than all earlier ones, and the ring has no version with this
                number and digest.
            QuotaExceeded: The request pins the version, and the adapter has the maximum number of pins.
        """
        if version > self._highest:
            if is_pinned:
                self._check_pins()
            return None
        existing = self._versions.get(version)
        if existing is None or existing.digest != digest:
            raise VersionConflict(self._adapter.adapter_id, version)
        return existing

    def add(self, version: AdapterVersion) -> list[AdapterVersion]:
        """Add a version and return the versions that it evicts, oldest first."""
        self._versions[version.version] = version
        self.skip(version.version)
        return self._evict()

    def skip(self, version: int) -> None:
        """Record that numbers up to `version` have been used."""
        self._highest = max(self._highest, version)

    def mark_damaged(self, version: int) -> None:
        """Record that the version exists and is damaged."""
        self._damaged.add(version)
        self.skip(version)

    def is_damaged(self, version: int) -> bool:
        """Return whether the version exists and is damaged."""
        return version in self._damaged

    def pinned(self, version: int, *, is_pinned: bool) -> AdapterVersion:
        """Return the version with its pin set or cleared, without changing the ring.

        Raises:
            VersionNotFound: The version is not in the ring.
            CheckpointDamaged: The version's record cannot be read.
            QuotaExceeded: The adapter has the maximum number of pins.
        """
        current = self.get(version)
        if is_pinned and not current.is_pinned:
            self._check_pins()
        return replace(current, is_pinned=is_pinned)

    def check_removable(self, version: int) -> AdapterVersion:
        """Return a version after checking that it may be removed.

        Raises:
            VersionNotFound: The version is not in the ring.
            CheckpointDamaged: The version's record cannot be read.
            InUse: The version is pinned or the newest.
        """
        found = self.get(version)
        if found.is_pinned:
            raise InUse('version', str(found.version), 'its pin')
        if found == self.newest:
            raise InUse('version', str(found.version), 'samplers, because it is the newest')
        return found

    def remove(self, version: int) -> None:
        """Remove a version, damaged or not, from the ring."""
        if version in self._damaged:
            self._damaged.remove(version)
        else:
            del self._versions[version]

    def _evict(self) -> list[AdapterVersion]:
        unpinned = [number for number in sorted(self._versions) if not self._versions[number].is_pinned]
        # The newest version is never evicted: if it is unpinned, it is among the last `capacity` ones.
        return [self._versions.pop(number) for number in unpinned[: -self._capacity]]

    def _check_pins(self) -> None:
        if sum(version.is_pinned for version in self._versions.values()) >= self._pin_limit:
            raise QuotaExceeded('pinned_versions', self._pin_limit)
