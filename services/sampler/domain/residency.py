"""A set of resident versions with a limited size. Idle versions are evicted in least-recently-used order.

This module only records which versions are resident. Its caller loads and unloads the weights.
"""

from dataclasses import dataclass

from twinkle_services.sampler.domain.adapter import AdapterKey, AdapterWeights, VersionKey


@dataclass(kw_only=True)
class ResidentVersion:
    """A loaded version."""

    key: VersionKey
    size_bytes: int
    digest: str
    use_count: int = 0
    """Number of leases, that is, of requests that wait or run with this version."""
    last_use: int = 0
    """Sequence number of the last use; the version with the smallest number is evicted first."""
    weights: AdapterWeights | None = None
    """The received weights, for relaying to other samplers."""
    is_unloaded_when_idle: bool = False
    """Whether to unload the version when its last lease ends."""
    is_base: bool = False
    """Whether the version replaces the engine's base weights; False for an adapter."""


class Residency:
    """The resident versions of one sampler."""

    def __init__(self, max_versions: int, max_bytes: int = 1 << 62) -> None:
        """Create an empty set for at most `max_versions` versions, with a total size of at most `max_bytes`.

        Raises:
            ValueError: `max_versions` is below 1.
        """
        if max_versions < 1:
            raise ValueError(f'max_versions must be at least 1, got {max_versions}')
        self.max_versions = max_versions
        self.max_bytes = max_bytes
        self._versions: dict[VersionKey, ResidentVersion] = {}
        self._use_number = 0

    def get(self, key: VersionKey) -> ResidentVersion | None:
        """Return a version; None if it is not resident."""
        return self._versions.get(key)

    def newest(self, adapter: AdapterKey) -> ResidentVersion | None:
        """Return an adapter's newest resident version; None if it has no resident version."""
        resident = self.versions_of(adapter)
        return resident[-1] if resident else None

    def versions_of(self, adapter: AdapterKey) -> list[ResidentVersion]:
        """Return an adapter's resident versions, oldest first."""
        resident = [item for key, item in self._versions.items() if key.adapter == adapter]
        return sorted(resident, key=lambda item: item.key.version)

    def of_tenant(self, tenant_id: str) -> list[ResidentVersion]:
        """Return a tenant's resident versions, ordered by adapter and version."""
        resident = [item for key, item in self._versions.items() if key.adapter.tenant_id == tenant_id]
        return sorted(resident, key=lambda item: item.key)

    def all(self) -> list[ResidentVersion]:
        """Return all resident versions, most recently used first."""
        return sorted(self._versions.values(), key=lambda item: -item.last_use)

    @property
    def size_bytes(self) -> int:
        """Total size of the resident versions, in bytes."""
        return sum(item.size_bytes for item in self._versions.values())

    def evict_for(self, size_bytes: int = 0) -> list[VersionKey] | None:
        """Remove idle versions until one more version of `size_bytes` fits.

        Returns:
            The removed versions, which the caller unloads; None, without any removal, if the versions in use leave too
            little capacity.
        """
        idle = sorted((item for item in self._versions.values() if not item.use_count), key=lambda item: item.last_use)
        evicted: list[VersionKey] = []
        count, total_bytes = len(self._versions), self.size_bytes
        while count + 1 > self.max_versions or total_bytes + size_bytes > self.max_bytes:
            if len(evicted) == len(idle):
                return None
            item = idle[len(evicted)]
            evicted.append(item.key)
            count, total_bytes = count - 1, total_bytes - item.size_bytes
        for key in evicted:
            del self._versions[key]
        return evicted

    def add(self, version: ResidentVersion) -> None:
        """Add a version, for which the caller has made space with `evict_for`.

        A new version of a resident adapter takes over the last use of the adapter's other versions, so that publishing
        alone does not keep an adapter in memory.
        """
        others = self.versions_of(version.key.adapter)
        version.last_use = max((item.last_use for item in others), default=0)
        if not others:
            self.touch(version)
        self._versions[version.key] = version

    def use(self, version: ResidentVersion) -> None:
        """Add a lease on a version."""
        version.use_count += 1
        self.touch(version)

    def release(self, version: ResidentVersion) -> None:
        """Remove a lease on a version."""
        version.use_count -= 1

    def evict_adapter(self, adapter: AdapterKey) -> list[VersionKey]:
        """Remove and return the idle versions of an adapter. `evict_released` removes the others when they are idle."""
        for item in self.versions_of(adapter):
            item.is_unloaded_when_idle = True
        return [item.key for item in self.versions_of(adapter) if self.evict_released(item)]

    def evict_released(self, version: ResidentVersion) -> bool:
        """Remove a version that is to be unloaded and is idle; return whether it was removed."""
        is_evicted = version.is_unloaded_when_idle and not version.use_count and self.get(version.key) is version
        if is_evicted:
            del self._versions[version.key]
        return is_evicted

    def touch(self, version: ResidentVersion) -> None:
        """Mark a version as used now."""
        self._use_number += 1
        version.last_use = self._use_number
