"""A fair queue for each base model: one that is busy, or away, leaves the others their places.

Pure, as `fair_queue` is.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from services.gateway.futures.rules import Future
from services.gateway.sampling.fair_queue import FairQueue, Places, equal_weight, nobody

MOST_QUEUES = 64
"""Base models with places of their own at a time; names are clients' texts, and further ones share a queue."""
_SHARED = ''


class FairQueues:
    """Futures that may begin, by base model; in each, tenants share turns by their weights."""

    def __init__(
        self,
        places: Places,
        *,
        weight_of: Callable[[str], float] = equal_weight,
        is_held: Callable[[str], bool] = nobody,
    ) -> None:
        """Begin empty; each base model has `places`, and tenants have weights and are held as in a `FairQueue`."""
        self._make = partial(FairQueue, places, weight_of=weight_of, is_held=is_held)
        self._queues: OrderedDict[str, FairQueue] = OrderedDict()
        """Those asked longest ago first; only those that something waits or runs in."""
        self._counts: dict[str, int] = {}
        self._homes: dict[str, str] = {}
        """By future, the queue it is in."""

    def add(self, future: Future) -> None:
        """Let a future wait for a place."""
        name = future.base_model
        if name not in self._queues and len(self._queues) >= MOST_QUEUES:
            name = _SHARED
        self._homes[future.future_id] = name
        self._counts[name] = self._counts.get(name, 0) + 1
        self._queues.setdefault(name, self._make()).add(future)

    def take(self) -> Future | None:
        """Return a future that begins now, which has a place until `give_back`; None where none may.

        Base models take turns.
        """
        for name in list(self._queues):
            future = self._queues[name].take()
            self._queues.move_to_end(name)
            if future is not None:
                return future
        return None

    @property
    def is_anybody_held(self) -> bool:
        """Whether something waits of a tenant that is held."""
        return any(queue.is_anybody_held for queue in self._queues.values())

    def give_back(self, future: Future) -> None:
        """Free the place that a future had."""
        name = self._homes[future.future_id]
        self._queues[name].give_back(future.tenant_id)
        self._leave(future, name)

    def drop(self, future: Future) -> bool:
        """Let a future wait no more; False where it does not wait here."""
        name = self._homes.get(future.future_id)
        if name is None or not self._queues[name].drop(future):
            return False
        self._leave(future, name)
        return True

    def __len__(self) -> int:
        """How many queues are in use."""
        return len(self._queues)

    def _leave(self, future: Future, name: str) -> None:
        del self._homes[future.future_id]
        self._counts[name] -= 1
        if not self._counts[name]:
            del self._counts[name], self._queues[name]
