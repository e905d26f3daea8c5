"""Slots that tenants share by weight: fair shares, a queue for slots, and the slots of sampler replicas.

`FairShares` and `FairSlots` do no I/O and never wait. Futures use `FairSlots` too.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from twinkle_services.gateway.fleet.rules import Replica
from twinkle_services.kit.errors import Draining, QueueFull

Item = TypeVar('Item')

SLACK = 1.25
"""Number of sequences sent to a replica per sequence that it can run, so that it stays busy between two requests."""
_REMEMBERED = 1024
"""Minimum number of idle tenants whose last service is remembered, so that a tenant that soon returns has no
advantage."""


def equal_weight(tenant_id: str) -> float:
    del tenant_id
    return 1.0


class FairShares:
    """Amount of service that each tenant received, relative to its weight. An idle tenant gains no priority.

    `weight_of` returns a tenant's current weight, above 0. Tenants for whom `is_active` returns True, because they have
    waiting or running items, are never forgotten. The rule is start-time fair queueing (Goyal, Vin and Cheng, 1996).
    """

    def __init__(self, weight_of: Callable[[str], float], *, is_active: Callable[[str], bool]) -> None:
        self._weight_of = weight_of
        self._is_active = is_active
        self._now = 0.0
        """Virtual time: the start of the last service."""
        self._next: dict[str, float] = {}
        """Virtual start of each tenant's next service, least recently served first."""

    def start_of(self, tenant_id: str) -> float:
        """Return the virtual start of a tenant's next service; the smallest is next."""
        return max(self._now, self._next.get(tenant_id, 0.0))

    def serve(self, tenant_id: str, *, cost: float = 1.0) -> None:
        """Record a service of a tenant; `cost` has the same unit for all tenants."""
        self._now = self.start_of(tenant_id)
        self._next.pop(tenant_id, None)
        self._next[tenant_id] = self._now + cost / self._weight_of(tenant_id)
        if len(self._next) > 3 * _REMEMBERED:
            idle = [name for name in self._next if not self._is_active(name)]
            for name in idle[:-_REMEMBERED]:
                del self._next[name]


class FairSlots(Generic[Item]):
    """Items that wait for slots, by tenant and in order of arrival, and the number of slots that each tenant has.

    `weight_of` returns a tenant's current weight, above 0; `cost_of` returns the number of slots that an item takes.
    """

    def __init__(
        self, *, weight_of: Callable[[str], float] = equal_weight, cost_of: Callable[[Item], int] = lambda _: 1
    ) -> None:
        self._cost_of = cost_of
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        """Items by tenant; the tenant that has waited longest, since its last service or its first item, is first."""
        self._running: Counter[str] = Counter()
        self.running_count = 0
        """Number of slots in use."""
        self._shares = FairShares(weight_of, is_active=lambda name: name in self._waiting or name in self._running)

    @property
    def is_empty(self) -> bool:
        """Whether there are no waiting and no running items."""
        return not self._waiting and not self.running_count

    @property
    def waiting_tenants(self) -> Collection[str]:
        return self._waiting.keys()

    def waiting_count(self, tenant_id: str) -> int:
        return len(self._waiting.get(tenant_id, ()))

    def slots_of(self, tenant_id: str) -> int:
        return self._running[tenant_id]

    def add(self, tenant_id: str, item: Item) -> None:
        self._waiting.setdefault(tenant_id, deque()).append(item)

    def take(self, is_eligible: Callable[[str], bool]) -> Item | None:
        """Assign slots to the next item and return it; None if no eligible tenant has a waiting item.

        The next tenant is the eligible one with the least service for its weight; among equal tenants, the one with the
        fewest slots, and then the one that has waited longest. The slots stay in use until `release`.
        """
        eligible = [tenant for tenant in self._waiting if is_eligible(tenant)]
        if not eligible:
            return None
        tenant = min(eligible, key=lambda name: (self._shares.start_of(name), self._running[name]))
        item = self._waiting[tenant].popleft()
        self._waiting.move_to_end(tenant)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        cost = self._cost_of(item)
        self._shares.serve(tenant, cost=cost)
        self._running[tenant] += cost
        self.running_count += cost
        return item

    def release(self, tenant_id: str, count: int = 1) -> None:
        self._running[tenant_id] -= count
        self.running_count -= count
        if not self._running[tenant_id]:
            del self._running[tenant_id]

    def remove(self, tenant_id: str, item: Item) -> bool:
        """Remove a waiting item; return False if it does not wait here."""
        waiting = self._waiting.get(tenant_id, deque())
        if item not in waiting:
            return False
        waiting.remove(item)
        if not waiting:
            del self._waiting[tenant_id]
        return True

    def clear_waiting(self) -> list[Item]:
        """Remove all waiting items and return them."""
        items = [item for waiting in self._waiting.values() for item in waiting]
        self._waiting.clear()
        return items


@dataclass(eq=False)
class Slot:
    """Slot of one request on a replica, for all of its sequences."""

    tenant_id: str
    sequence_count: int
    """Number of unfinished sequences."""
    replica_id: str = ''
    is_granted: bool = False
    _is_resolved: asyncio.Event = field(default_factory=asyncio.Event)
    _error: Draining | None = None

    async def wait(self) -> None:
        """Return when the slot is granted.

        Raises:
            Draining: the replica left the fleet first.
        """
        if not self.is_granted:
            await self._is_resolved.wait()
        if self._error is not None:
            raise self._error

    def grant(self) -> None:
        self.is_granted = True
        self._is_resolved.set()

    def fail(self) -> None:
        """Refuse the slot, so that the request tries another replica."""
        self._error = Draining()
        self._is_resolved.set()


class ReplicaQueue:
    """Queue of the requests for one replica; it does no I/O."""

    def __init__(self, *, weight_of: Callable[[str], float] = equal_weight) -> None:
        self.capacity: int | None = None
        """Maximum number of sequences that the replica runs; None if it is not reported. No request waits then."""
        self.slots = FairSlots[Slot](weight_of=weight_of, cost_of=lambda slot: slot.sequence_count)
        """Requests of the replica, waiting and granted."""

    def add(self, slot: Slot) -> None:
        """Append a request; `grant` decides when it runs."""
        self.slots.add(slot.tenant_id, slot)

    def grant(self) -> list[Slot]:
        """Grant slots while there is capacity and return them.

        A request that is larger than the remaining capacity is granted too, and the engine queues the excess; otherwise
        smaller requests would always overtake a large one. A tenant without slots never waits, because the responses of
        other tenants may take long: a response that no client reads does not finish.
        """
        granted: list[Slot] = []
        while (slot := self.slots.take(self._is_eligible)) is not None:
            slot.grant()
            granted.append(slot)
        return granted

    def finish(self, slot: Slot, count: int | None = None) -> None:
        """Record that `count` sequences of a request finished, or all of them (None)."""
        count = slot.sequence_count if count is None else min(count, slot.sequence_count)
        slot.sequence_count -= count
        if slot.is_granted:
            self.slots.release(slot.tenant_id, count)
        elif not slot.sequence_count:
            self.slots.remove(slot.tenant_id, slot)

    def _is_eligible(self, tenant_id: str) -> bool:
        has_capacity = self.capacity is None or self.slots.running_count < SLACK * self.capacity
        return has_capacity or not self.slots.slots_of(tenant_id)


class ReplicaSlots:
    """Slots at all replicas, which tenants share by weight. Excess requests wait here and not in the sampler's queue.

    At most `waiting_per_tenant` requests of a tenant wait for one replica. Each gateway grants slots independently, so
    several gateways together may send a replica more requests than one gateway would.

    Concurrency: use it from one event loop.
    """

    def __init__(self, *, waiting_per_tenant: int, weight_of: Callable[[str], float] = equal_weight) -> None:
        self._waiting_per_tenant = waiting_per_tenant
        self._weight_of = weight_of
        self._queues: dict[str, ReplicaQueue] = {}

    @contextmanager
    def reserve(self, replica: Replica, tenant_id: str, sequence_count: int) -> Iterator[Slot]:
        """Queue a request for a replica for the duration of the block; `Slot.wait` returns when it may run.

        Raises:
            QueueFull: too many requests of the tenant wait there.
        """
        queue = self._queues.setdefault(replica.replica_id, ReplicaQueue(weight_of=self._weight_of))
        load = replica.report.load
        queue.capacity = load.max_sequence_count if load is not None and load.max_sequence_count > 0 else None
        if (waiting := queue.slots.waiting_count(tenant_id)) >= self._waiting_per_tenant:
            raise QueueFull(queue_length=waiting, queue_limit=self._waiting_per_tenant)
        slot = Slot(tenant_id, sequence_count, replica.replica_id)
        queue.add(slot)
        queue.grant()
        try:
            yield slot
        finally:
            self.finish(slot)

    def finish(self, slot: Slot, count: int | None = None) -> None:
        """Record that `count` sequences of a request finished, or all of them (None), and grant the next requests."""
        queue = self._queues.get(slot.replica_id)
        if queue is None:
            return
        queue.finish(slot, count)
        queue.grant()
        if queue.slots.is_empty:
            del self._queues[slot.replica_id]

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Fail the requests that wait for replicas that are not in `replica_ids`."""
        for replica_id in self._queues.keys() - set(replica_ids):
            for slot in self._queues[replica_id].slots.clear_waiting():
                slot.fail()
