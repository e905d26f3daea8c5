"""Limits of futures: the number and size of unfinished ones, the quotas of sampling, and the number of running ones.

`FutureQueue` has separate slots for each base model, which tenants share by weight. A busy or unavailable base model
therefore takes no slots from other base models. The queue does no I/O and never waits.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from twinkle_services.gateway.futures.rules import SAMPLE_KIND, Bounds, Future
from twinkle_services.gateway.quotas.enforcement import SamplingGate
from twinkle_services.gateway.sampling.slots import FairSlots, equal_weight
from twinkle_services.kit.errors import BytesFull, QueueFull

UNBOUNDED = Bounds(per_tenant=1 << 62, total=1 << 62)
MAX_QUEUES = 64
"""Maximum number of base models with separate slots. Clients choose the names, so further base models share a queue."""
_SHARED = ''


@dataclass
class _Entry:
    """Unfinished future."""

    size_bytes: int
    holders: int = 1
    """Number of calls of `enter` and `enter_accepted` that no `leave` has undone."""


class FutureCapacity:
    """Limits the number of unfinished futures to `bounds`, and the total bytes of their requests to `sizes`.

    A future counts once, until `leave` has been called as often as `enter` and `enter_accepted` together. `gate` also
    counts the futures that sample, and applies quotas to them.
    """

    def __init__(self, bounds: Bounds, *, sizes: Bounds = UNBOUNDED, gate: SamplingGate | None = None) -> None:
        self._bounds = bounds
        self._sizes = sizes
        self._gate = gate
        self._entries: dict[str, dict[str, _Entry]] = {}
        self._bytes: dict[str, int] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Number of unfinished futures."""
        return self._count

    def enter(self, future: Future, size_bytes: int = 0) -> None:
        """Count a new future if the limits allow it; a future that is counted already is never refused.

        Raises:
            QueueFull: the tenant or all tenants together have too many futures.
            BytesFull: the requests of the tenant, or of all tenants, are too large in total.
            QuotaExceeded: the future samples, and its tenant has too many samples in flight or is over its token rate.
        """
        if (gate := self._gate_of(future)) is not None:
            gate.check(future.tenant_id, future.future_id)
        entries = self._entries.get(future.tenant_id, {})
        if future.future_id not in entries:
            _check(len(entries), 1, self._count, self._bounds, QueueFull)
            total = sum(self._bytes.values())
            _check(self._bytes.get(future.tenant_id, 0), size_bytes, total, self._sizes, BytesFull)
        self.enter_accepted(future, size_bytes)

    def enter_accepted(self, future: Future, size_bytes: int = 0) -> None:
        """Count a future that was accepted before, even beyond the bounds."""
        if (gate := self._gate_of(future)) is not None:
            gate.enter(future.tenant_id, future.future_id)
        entries = self._entries.setdefault(future.tenant_id, {})
        if (known := entries.get(future.future_id)) is not None:
            known.holders += 1
            return
        entries[future.future_id] = _Entry(size_bytes)
        self._count += 1
        self._bytes[future.tenant_id] = self._bytes.get(future.tenant_id, 0) + size_bytes

    def leave(self, future: Future) -> None:
        """Undo one call of `enter` or `enter_accepted`; an unknown future is ignored."""
        if (gate := self._gate_of(future)) is not None:
            gate.leave(future.tenant_id, future.future_id)
        entries = self._entries.get(future.tenant_id, {})
        if (known := entries.get(future.future_id)) is None:
            return
        known.holders -= 1
        if known.holders:
            return
        del entries[future.future_id]
        self._count -= 1
        self._bytes[future.tenant_id] -= known.size_bytes
        if not entries:
            del self._entries[future.tenant_id], self._bytes[future.tenant_id]

    def size_bytes(self, future: Future) -> int:
        """Return the size of the request of a counted future; 0 for other futures."""
        known = self._entries.get(future.tenant_id, {}).get(future.future_id)
        return known.size_bytes if known else 0

    def _gate_of(self, future: Future) -> SamplingGate | None:
        return self._gate if future.kind == SAMPLE_KIND else None


def _check(used: int, more: int, total: int, bounds: Bounds, refusal: type[QueueFull]) -> None:
    if used + more > bounds.per_tenant:
        raise refusal(queue_length=used, queue_limit=bounds.per_tenant)
    if total + more > bounds.total:
        raise refusal(queue_length=total, queue_limit=bounds.total)


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
        """Return a future to start now; it has a slot until `release`. Return None if no future may start.

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
