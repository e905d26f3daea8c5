"""The versions of one adapter: the newest few, and those that are pinned.

The newest one stays, so that the numbers count up even after a restart. Only collecting what nobody
uses takes it away, and then its number is remembered.
"""

from dataclasses import replace

from services.checkpoint.domain.errors import VersionConflict
from services.checkpoint.domain.keys import AdapterKey
from services.checkpoint.domain.records import AdapterVersion
from services.kit.errors import InUse, QuotaExceeded, VersionNotFound


class VersionRing:
    """Versions in the order of their numbers."""

    def __init__(self, adapter: AdapterKey, *, capacity: int, pin_limit: int) -> None:
        """Begin empty.

        Args:
            adapter: Whose versions these are.
            capacity: Most versions that are not pinned, at least 1.
            pin_limit: Most versions that are.
        """
        self._adapter = adapter
        self._capacity = capacity
        self._pin_limit = pin_limit
        self._versions: dict[int, AdapterVersion] = {}
        self._highest = 0

    @property
    def newest(self) -> AdapterVersion | None:
        """The version with the highest number."""
        return self._versions[max(self._versions)] if self._versions else None

    def all_newest_first(self) -> list[AdapterVersion]:
        """Return every version, highest number first."""
        return [self._versions[number] for number in sorted(self._versions, reverse=True)]

    def has(self, version: int) -> bool:
        """Say whether a version is here."""
        return version in self._versions

    def get(self, version: int) -> AdapterVersion:
        """Return a version; 0 is the newest.

        Raises:
            VersionNotFound: it never was, or has left.
        """
        found = self._versions.get(version) if version else self.newest
        if found is None:
            raise VersionNotFound(self._adapter.adapter_id, version)
        return found

    def match(self, version: int, digest: str, *, is_pinned: bool) -> AdapterVersion | None:
        """Return the version if it is here with the same digest; None if it may be added.

        Raises:
            VersionConflict: it is neither.
            QuotaExceeded: it asks to be pinned, and as many as may be are.
        """
        if version > self._highest:
            if is_pinned:
                self._check_pins()
            return None
        held = self._versions.get(version)
        if held is None or held.digest != digest:
            raise VersionConflict(self._adapter.adapter_id, version)
        return held

    def add(self, version: AdapterVersion) -> list[AdapterVersion]:
        """Add a version and return those that had to leave for it, oldest first."""
        self._versions[version.version] = version
        self.skip(version.version)
        return self._evict()

    def skip(self, version: int) -> None:
        """Remember that numbers up to `version` were given, also where nothing else tells of it."""
        self._highest = max(self._highest, version)

    def pinned(self, version: int, *, is_pinned: bool) -> AdapterVersion:
        """Return the version as it would be, pinned or not; nothing changes yet.

        Raises:
            VersionNotFound: it never was, or has left.
            QuotaExceeded: as many as may be are pinned.
        """
        held = self.get(version)
        if is_pinned and not held.is_pinned:
            self._check_pins()
        return replace(held, is_pinned=is_pinned)

    def check_removable(self, version: int) -> AdapterVersion:
        """Return a version that may be removed.

        Raises:
            VersionNotFound: it never was, or has left.
            InUse: it is the newest, or pinned.
        """
        held = self.get(version)
        if held.is_pinned:
            raise InUse('version', str(held.version), 'its pin')
        if held == self.newest:
            raise InUse('version', str(held.version), 'samplers, as the newest')
        return held

    def remove(self, version: int) -> None:
        """Forget a version."""
        del self._versions[version]

    def _evict(self) -> list[AdapterVersion]:
        loose = [number for number in sorted(self._versions) if not self._versions[number].is_pinned]
        # The newest is the last to go: should it be loose, it is among the `capacity` that stay.
        return [self._versions.pop(number) for number in loose[: -self._capacity]]

    def _check_pins(self) -> None:
        if sum(held.is_pinned for held in self._versions.values()) >= self._pin_limit:
            raise QuotaExceeded('pinned_versions', self._pin_limit)
