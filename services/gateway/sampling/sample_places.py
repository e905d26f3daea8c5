"""Sampling requests under way, by tenant. Pure bookkeeping, for one event loop."""

from collections import Counter


class SamplePlaces:
    """Counts requests; whoever enters one leaves it again, and it is counted until the last one has."""

    def __init__(self) -> None:
        """Begin with none."""
        self._held: dict[str, Counter[str]] = {}

    def count(self, tenant_id: str) -> int:
        """Return how many of a tenant's are under way."""
        return len(self._held.get(tenant_id, ()))

    def holds(self, tenant_id: str, key: str) -> bool:
        """Whether this one is."""
        return key in self._held.get(tenant_id, ())

    def enter(self, tenant_id: str, key: str) -> None:
        """Count a request."""
        self._held.setdefault(tenant_id, Counter())[key] += 1

    def leave(self, tenant_id: str, key: str) -> None:
        """Count it no more; one that is not counted is no error."""
        held = self._held.get(tenant_id)
        if held is None or key not in held:
            return
        held[key] -= 1
        if not held[key]:
            del held[key]
        if not held:
            del self._held[tenant_id]
