"""Fair sharing between tenants, and the slots of requests on a replica."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_services.gateway.fleet.rules import Replica, ReplicaLoad, ReplicaReport, ReplicaState
from twinkle_services.gateway.sampling.slots import (
    SLACK,
    FairShares,
    FairSlots,
    ReplicaQueue,
    ReplicaSlots,
    Slot,
    equal_weight,
)
from twinkle_services.kit.errors import Draining, QueueFull

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
LOAD = ReplicaLoad(max_sequence_count=4)
REPORT = ReplicaReport(replica_id='r-1', service='sampler', address='127.0.0.1:1', load=LOAD)
REPLICA = Replica(report=REPORT, state=ReplicaState.READY, heartbeat_time=MOMENT, join_time=MOMENT)


def served(demands: Mapping[str, int], *, weights: Mapping[str, float], cost: Mapping[str, int]) -> Counter[str]:
    """Return how many sequences each tenant ran until one tenant had no requests remaining, with a capacity of 64."""
    queue = ReplicaQueue(weight_of=weights.__getitem__)
    queue.capacity = 64
    remaining, counts = Counter(demands), Counter[str]()
    running: list[Slot] = []
    for tenant, count in demands.items():
        for _ in range(count):
            queue.add(Slot(tenant, cost[tenant]))
    while all(remaining.values()):
        for slot in queue.grant():
            remaining[slot.tenant_id] -= 1
            counts[slot.tenant_id] += slot.sequence_count
            running.append(slot)
        queue.finish(running.pop(0))
    return counts


@pytest.mark.parametrize('weights', [{'few': 1.0, 'many': 1.0}, {'few': 3.0, 'many': 1.0}])
@pytest.mark.parametrize('cost', [{'few': 1, 'many': 1}, {'few': 1, 'many': 4}])
def test_tenants_share_by_weight_and_not_by_demand(weights: Mapping[str, float], cost: Mapping[str, int]) -> None:
    """A tenant with ten times the requests, or with larger requests, runs only its weighted share of sequences."""
    counts = served({'few': 2000, 'many': 20000}, weights=weights, cost=cost)
    assert counts['few'] / counts['many'] == pytest.approx(weights['few'] / weights['many'], rel=0.1)


def test_requests_wait_only_above_a_reported_capacity() -> None:
    """A replica gets requests up to `SLACK` times its reported capacity, and all requests if it reports no capacity."""
    queue = ReplicaQueue()
    for _ in range(100):
        queue.add(Slot('a', 1))
    queue.capacity = 8
    assert len(queue.grant()) == SLACK * 8
    queue.capacity = None
    assert len(queue.grant()) == 100 - SLACK * 8


def test_tenant_without_slots_is_not_locked_out() -> None:
    """Each tenant gets at least one slot on a replica that other tenants fill with requests that never finish."""
    queue = ReplicaQueue()
    queue.capacity = 4
    for _ in range(100):
        queue.add(Slot('stuck', 1))
    queue.grant()
    for tenant in ('b', 'b', 'c'):
        queue.add(Slot(tenant, 1))
    assert [slot.tenant_id for slot in queue.grant()] == ['b', 'c']
    assert queue.grant() == []


def test_cancelled_item_does_not_count_as_service() -> None:
    """A tenant that cancels a waiting item is still served before tenants that came later."""
    slots = FairSlots[str]()
    for tenant, item in (('a', 'a-1'), ('a', 'a-2'), ('b', 'b-1')):
        slots.add(tenant, item)
    assert slots.remove('a', 'a-1')
    assert [slots.take(lambda _: True) for _ in range(3)] == ['a-2', 'b-1', None]


@given(st.lists(st.tuples(st.sampled_from('abc'), st.integers(1, 5), st.integers(0, 3)), max_size=60))
def test_all_requests_are_granted_and_leave_no_slot_behind(steps: list[tuple[str, int, int]]) -> None:
    """Requests that finish in parts, or while they wait, release all of their slots; all others are granted."""
    queue = ReplicaQueue()
    queue.capacity = 3
    added: list[Slot] = []
    for tenant, count, finish_count in steps:
        added.append(Slot(tenant, count))
        queue.add(added[-1])
        queue.grant()
        for slot in added[:finish_count]:
            queue.finish(slot, 1)
        if finish_count == 3:
            queue.finish(added.pop())
        queue.grant()
    for _ in range(sum(count for _, count, _ in steps) + 1):
        for slot in [item for item in added if item.is_granted]:
            queue.finish(slot)
        queue.grant()
    assert all(slot.is_granted or not slot.sequence_count for slot in added)
    assert queue.slots.is_empty


async def test_waiting_request_is_granted_or_fails_when_its_replica_leaves() -> None:
    """A waiting request starts when a slot is free and fails when its replica leaves; a running request continues."""
    slots = ReplicaSlots(waiting_per_tenant=8)
    with slots.reserve(REPLICA, 'a', 5) as running, slots.reserve(REPLICA, 'a', 1) as waiting:
        assert (running.is_granted, waiting.is_granted) == (True, False)
        waiting_task = asyncio.ensure_future(waiting.wait())
        await asyncio.sleep(0)
        slots.finish(running, 1)
        await waiting_task
        with slots.reserve(REPLICA, 'a', 1) as late:
            slots.keep_only({'r-2'})
            with pytest.raises(Draining):
                await late.wait()
        await running.wait()
    with slots.reserve(REPLICA, 'b', 9) as again:
        assert again.is_granted


async def test_slot_of_a_cancelled_request_is_free() -> None:
    """A request that is cancelled while it waits occupies no slot."""
    slots = ReplicaSlots(waiting_per_tenant=8)
    with slots.reserve(REPLICA, 'a', 5):
        with slots.reserve(REPLICA, 'a', 100) as cancelled:
            assert not cancelled.is_granted
        with slots.reserve(REPLICA, 'a', 1) as waiting:
            waiting_task = asyncio.ensure_future(waiting.wait())
            await asyncio.sleep(0)
            waiting_task.cancel()
    with slots.reserve(REPLICA, 'a', 1) as last:
        assert last.is_granted


async def test_waiting_requests_of_a_tenant_are_bounded() -> None:
    """A request over the bound is refused and uses no slot; other tenants are not refused."""
    slots = ReplicaSlots(waiting_per_tenant=1)
    with slots.reserve(REPLICA, 'a', 5), slots.reserve(REPLICA, 'a', 1), slots.reserve(REPLICA, 'b', 5):
        for _ in range(2):
            with pytest.raises(QueueFull), slots.reserve(REPLICA, 'a', 1):
                pass
        with slots.reserve(REPLICA, 'b', 1) as other:
            assert not other.is_granted


def test_idle_tenants_are_removed_and_active_ones_are_kept() -> None:
    """Only active and recent tenants keep their shares after thousands of tenants were served."""
    shares = FairShares(equal_weight, is_active=lambda name: name == 't0')
    for number in range(5000):
        shares.serve(f't{number}', cost=2.0)
    known = [number for number in range(5000) if shares.start_of(f't{number}') == 2.0]
    assert known[0] == 0
    assert known[-1] == 4999
    assert len(known) <= 3073
