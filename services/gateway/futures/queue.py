"""Queue of the futures that may start: tenants share slots by weight, and each base model has separate slots.

A busy or unavailable base model therefore takes no slots from other base models. The queue does no I/O and never waits.
"""

from collections import OrderedDict
from collections.abc import Callable

from twinkle_services.gateway.futures.rules import Bounds, Future
from twinkle_services.gateway.sampling.slots import FairSlots, equal_weight

MAX_QUEUES = 64
"""Maximum number of base models with separate slots. Clients choose the names, so further base models share a queue."""
_SHARED = ''


def never_rate_limited(tenant_id: str) -> bool:
    del tenant_id
    return False


class FutureQueue:
    """Futures that wait for a slot or have one. Futures of one tenant and base model start in order of arrival.

    `bounds` limits the slots of each base model. While `is_rate_limited` returns True for a tenant, its waiting futures
    stay in the queue.
    """

    def __init__(
        self,
        bounds: Bounds,
        *,
        weight_of: Callable[[str], float] = equal_weight,
        is_rate_limited: Callable[[str], bool] = never_rate_limited,
    ) -> None:
        self._bounds = bounds
        self._weight_of = weight_of
        self._is_rate_limited = is_rate_limited
        self._slots: OrderedDict[str, FairSlots[Future]] = OrderedDict()
        """Slots of the base models in use, in the order in which `take` tries them."""
        self._names: dict[str, str] = {}
        """Name of the slots that each future uses, by the future's id."""

    def add(self, future: Future) -> None:
        name = future.base_model
        if name not in self._slots and len(self._slots) >= MAX_QUEUES:
            name = _SHARED
        self._names[future.future_id] = name
        if name not in self._slots:
            self._slots[name] = FairSlots[Future](weight_of=self._weight_of)
        self._slots[name].add(future.tenant_id, future)

    def take(self) -> Future | None:
        """Return a future to start now, which has a slot until `release`; None if no future may start.

        Base models are served in turn.
        """
        for name in list(self._slots):
            future = self._take_from(self._slots[name])
            self._slots.move_to_end(name)
            if future is not None:
                return future
        return None

    def _take_from(self, slots: FairSlots[Future]) -> Future | None:
        if slots.running_count >= self._bounds.total:
            return None
        return slots.take(
            lambda tenant: slots.slots_of(tenant) < self._bounds.per_tenant and not self._is_rate_limited(tenant)
        )

    @property
    def has_rate_limited_tenant(self) -> bool:
        """Whether futures of a rate-limited tenant wait."""
        return any(self._is_rate_limited(tenant) for slots in self._slots.values() for tenant in slots.waiting_tenants)

    def release(self, future: Future) -> None:
        name = self._names.pop(future.future_id)
        self._slots[name].release(future.tenant_id)
        self._drop_empty(name)

    def remove(self, future: Future) -> bool:
        """Remove a waiting future; return False if it does not wait here."""
        name = self._names.get(future.future_id)
        if name is None or not self._slots[name].remove(future.tenant_id, future):
            return False
        del self._names[future.future_id]
        self._drop_empty(name)
        return True

    def __len__(self) -> int:
        return len(self._slots)

    def _drop_empty(self, name: str) -> None:
        if self._slots[name].is_empty:
            del self._slots[name]
