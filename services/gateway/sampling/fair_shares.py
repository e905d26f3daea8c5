"""Shares by weight: how far each tenant has come, and so whose turn it is.

Start-time fair queueing (Goyal, Vin and Cheng, 1996). Pure: it decides, and never waits or runs anything.
"""

from collections.abc import Callable

_REMEMBERED = 1024
"""Tenants with nothing here whose last turn is remembered at least, so that one that comes back at once gets no more
than its part."""


def equal_weight(tenant_id: str) -> float:
    """Return the weight of a tenant where all are alike."""
    del tenant_id
    return 1.0


class FairShares:
    """What tenants had, each by its weight; nobody saves up turns that it did not take."""

    def __init__(self, weight_of: Callable[[str], float], *, is_here: Callable[[str], bool]) -> None:
        """Begin with nobody.

        Args:
            weight_of: returns a tenant's weight as it is now, above 0.
            is_here: says whether a tenant has something waiting or running, so that it must not be forgotten.
        """
        self._weight_of = weight_of
        self._is_here = is_here
        self._now = 0.0
        """How far everybody has come who had something waiting: where the last turn began."""
        self._next: dict[str, float] = {}
        """Where a tenant's next turn begins, by who was served last."""

    def begin_of(self, tenant_id: str) -> float:
        """Return how far a tenant has come; whoever has come least far is next."""
        return max(self._now, self._next.get(tenant_id, 0.0))

    def serve(self, tenant_id: str, *, cost: float = 1.0) -> None:
        """Take note that a tenant has a turn, of a length that all turns are told in."""
        self._now = self.begin_of(tenant_id)
        self._next.pop(tenant_id, None)
        self._next[tenant_id] = self._now + cost / self._weight_of(tenant_id)
        if len(self._next) > 3 * _REMEMBERED:
            gone = [name for name in self._next if not self._is_here(name)]
            for name in gone[:-_REMEMBERED]:
                del self._next[name]
