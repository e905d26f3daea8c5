"""Which versions are held here: a bounded set, least recently used out first, never one in use.

Pure bookkeeping. Loading and unloading the weights is done by who asks.
"""

from dataclasses import dataclass

from services.sampler.domain.adapter import AdapterKey, AdapterWeights, VersionKey


@dataclass(kw_only=True)
class ResidentVersion:
    """A version that is loaded."""

    key: VersionKey
    size_bytes: int
    digest: str
    use_count: int = 0
    """Leases on it: requests that are waiting or running with it."""
    last_use: int = 0
    """Counts up over all uses of the set; the smallest leaves first."""
    weights: AdapterWeights | None = None
    """The weights as they came, for those who take them from here."""
    is_base: bool = False
    """Whether it is the base model of the engine now, instead of an adapter on it."""


class Residency:
    """The versions held by one sampler."""

    def __init__(self, max_versions: int, max_bytes: int = 1 << 62) -> None:
        """Hold at most `max_versions`, at least 1, of together at most `max_bytes`."""
        if max_versions < 1:
            raise ValueError(f'max_versions must be at least 1, got {max_versions}')
        self.max_versions = max_versions
        self.max_bytes = max_bytes
        self._versions: dict[VersionKey, ResidentVersion] = {}
        self._uses = 0

    def get(self, key: VersionKey) -> ResidentVersion | None:
        """Return a version if it is held."""
        return self._versions.get(key)

    def newest(self, adapter: AdapterKey) -> ResidentVersion | None:
        """Return the newest version held of an adapter."""
        held = self.versions_of(adapter)
        return held[-1] if held else None

    def versions_of(self, adapter: AdapterKey) -> list[ResidentVersion]:
        """Return the versions held of an adapter, oldest first."""
        held = [item for key, item in self._versions.items() if key.adapter == adapter]
        return sorted(held, key=lambda item: item.key.version)

    def of_tenant(self, tenant_id: str) -> list[ResidentVersion]:
        """Return all versions held for a tenant, by adapter and version."""
        held = [item for key, item in self._versions.items() if key.adapter.tenant_id == tenant_id]
        return sorted(held, key=lambda item: item.key)

    def all(self) -> list[ResidentVersion]:
        """Return all versions held, the most recently used first."""
        return sorted(self._versions.values(), key=lambda item: -item.last_use)

    @property
    def size_bytes(self) -> int:
        """Of all versions held."""
        return sum(item.size_bytes for item in self._versions.values())

    def make_room(self, size_bytes: int = 0) -> list[VersionKey] | None:
        """Forget versions until one more of `size_bytes` fits.

        Returns:
            What is to be unloaded; None if too many are in use and nothing was forgotten.
        """
        idle = sorted((item for item in self._versions.values() if not item.use_count), key=lambda item: item.last_use)
        leaving: list[VersionKey] = []
        count, held_bytes = len(self._versions), self.size_bytes
        while count + 1 > self.max_versions or held_bytes + size_bytes > self.max_bytes:
            if len(leaving) == len(idle):
                return None
            item = idle[len(leaving)]
            leaving.append(item.key)
            count, held_bytes = count - 1, held_bytes - item.size_bytes
        for key in leaving:
            del self._versions[key]
        return leaving

    def add(self, version: ResidentVersion) -> None:
        """Hold a version for which there is room.

        A newer version of an adapter that is here counts as used when the others were: publishing
        alone keeps nothing in memory.
        """
        siblings = self.versions_of(version.key.adapter)
        version.last_use = max((item.last_use for item in siblings), default=0)
        if not siblings:
            self.touch(version)
        self._versions[version.key] = version

    def use(self, version: ResidentVersion) -> None:
        """Note that a request holds on to a version."""
        version.use_count += 1
        self.touch(version)

    def release(self, version: ResidentVersion) -> None:
        """Note that a request lets go of a version."""
        version.use_count -= 1

    def forget_idle(self, adapter: AdapterKey) -> list[VersionKey]:
        """Forget the versions of an adapter that nothing uses and return them."""
        leaving = [item.key for item in self.versions_of(adapter) if not item.use_count]
        for key in leaving:
            del self._versions[key]
        return leaving

    def touch(self, version: ResidentVersion) -> None:
        """Note that a version is wanted now."""
        self._uses += 1
        version.last_use = self._uses
