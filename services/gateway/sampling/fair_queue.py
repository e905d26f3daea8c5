"""Whose turn it is: tenants share turns by their weights, however much each of them has waiting.

Each turn is of the same length. Pure: it decides, and never waits or runs anything.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.futures.rules import Future
from services.gateway.sampling.fair_shares import FairShares, equal_weight


@dataclass(frozen=True, kw_only=True)
class Places:
    """How much runs at a time."""

    tenant: int
    """Of one tenant."""
    total: int
    """Of all."""


def nobody(tenant_id: str) -> bool:
    """Hold no tenant."""
    del tenant_id
    return False


class FairQueue:
    """Futures that may begin, by tenant; each tenant's in the order they came."""

    def __init__(
        self,
        places: Places,
        *,
        weight_of: Callable[[str], float] = equal_weight,
        is_held: Callable[[str], bool] = nobody,
    ) -> None:
        """Begin empty, with all places free.

        Args:
            places: how many there are.
            weight_of: returns a tenant's weight as it is now, above 0.
            is_held: says whether a tenant may begin nothing now; what it has waiting keeps its order.
        """
        self._places = places
        self._is_held = is_held
        self._waiting: OrderedDict[str, deque[Future]] = OrderedDict()
        """Those served longest ago first."""
        self._running: Counter[str] = Counter()
        self._shares = FairShares(weight_of, is_here=lambda name: name in self._waiting or name in self._running)

    def add(self, future: Future) -> None:
        """Let a future wait for a place."""
        self._waiting.setdefault(future.tenant_id, deque()).append(future)

    def take(self) -> Future | None:
        """Return the future that begins now, which has a place until `give_back`; None where none may.

        It is of the tenant that has come least far, by turns for its weight, and has something waiting, not all its
        places, and is not held; among equals, of the one with the fewest places, then of the one served longest ago.
        """
        if self._running.total() >= self._places.total:
            return None
        able = [
            tenant
            for tenant in self._waiting
            if self._running[tenant] < self._places.tenant and not self._is_held(tenant)
        ]
        if not able:
            return None
        tenant = min(able, key=lambda name: (self._shares.begin_of(name), self._running[name]))
        self._shares.serve(tenant)
        future = self._waiting[tenant].popleft()
        if self._waiting[tenant]:
            self._waiting.move_to_end(tenant)
        else:
            del self._waiting[tenant]
        self._running[tenant] += 1
        return future

    @property
    def is_anybody_held(self) -> bool:
        """Whether something waits of a tenant that is held."""
        return any(self._is_held(tenant) for tenant in self._waiting)

    def give_back(self, tenant_id: str) -> None:
        """Free a place that a future of the tenant had."""
        self._running[tenant_id] -= 1
        if not self._running[tenant_id]:
            del self._running[tenant_id]

    def drop(self, future: Future) -> bool:
        """Let a future wait no more; False where it does not wait here."""
        waiting = self._waiting.get(future.tenant_id, deque())
        found = next((item for item in waiting if item.future_id == future.future_id), None)
        if found is None:
            return False
        waiting.remove(found)
        if not waiting:
            del self._waiting[future.tenant_id]
        return True
