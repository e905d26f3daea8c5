"""Turns at one replica: whose requests go there, and whose wait."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.fleet.rules import Replica, ReplicaLoad, ReplicaReport, ReplicaState
from services.gateway.sampling.replica_turns import SLACK, ReplicaTurns, Turn
from services.gateway.sampling.turns import Turns
from services.kit.errors import Draining, QueueFull

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
LOAD = ReplicaLoad(max_sequence_count=4)
REPORT = ReplicaReport(replica_id='r-1', service='sampler', address='127.0.0.1:1', load=LOAD)
REPLICA = Replica(report=REPORT, state=ReplicaState.READY, heartbeat_time=MOMENT, join_time=MOMENT)


def served(demands: Mapping[str, int], *, weights: Mapping[str, float], cost: Mapping[str, int]) -> Counter[str]:
    """Return the sequences that each tenant ran by the time the first one had nothing left, 64 at once."""
    turns = ReplicaTurns(weight_of=weights.__getitem__)
    turns.capacity = 64
    left, counts = Counter(demands), Counter[str]()
    running: list[Turn] = []
    for tenant, count in demands.items():
        for _ in range(count):
            turns.ask(Turn(tenant, cost[tenant]))
    while all(left.values()):
        for turn in turns.give():
            left[turn.tenant_id] -= 1
            counts[turn.tenant_id] += turn.weight
            running.append(turn)
        turns.done(running.pop(0))
    return counts


@pytest.mark.parametrize('weights', [{'few': 1.0, 'many': 1.0}, {'few': 3.0, 'many': 1.0}])
@pytest.mark.parametrize('cost', [{'few': 1, 'many': 1}, {'few': 1, 'many': 4}])
def test_tenants_share_by_weight_and_not_by_what_they_ask(
    weights: Mapping[str, float], cost: Mapping[str, int]
) -> None:
    """One with ten times the requests, each four times as large, runs no more sequences than its weight says."""
    counts = served({'few': 2000, 'many': 20000}, weights=weights, cost=cost)
    assert counts['few'] / counts['many'] == pytest.approx(weights['few'] / weights['many'], rel=0.1)


def test_nobody_waits_while_there_are_places_or_none_are_told() -> None:
    """A replica that says nothing of its size is given everything; one that does, a little more than it runs."""
    turns = ReplicaTurns()
    for _ in range(100):
        turns.ask(Turn('a', 1))
    turns.capacity = 8
    assert len(turns.give()) == SLACK * 8
    turns.capacity = None
    assert len(turns.give()) == 100 - SLACK * 8


def test_tenant_with_nothing_there_is_not_kept_away_by_answers_that_never_end() -> None:
    """Each tenant has at least one request at a replica that others fill."""
    turns = ReplicaTurns()
    turns.capacity = 4
    for _ in range(100):
        turns.ask(Turn('stuck', 1))
    turns.give()
    for tenant in ('b', 'b', 'c'):
        turns.ask(Turn(tenant, 1))
    assert [turn.tenant_id for turn in turns.give()] == ['b', 'c']
    assert turns.give() == []


@given(st.lists(st.tuples(st.sampled_from('abc'), st.integers(1, 5), st.integers(0, 3)), max_size=60))
def test_whatever_comes_and_goes_all_is_served_and_nothing_is_left(steps: list[tuple[str, int, int]]) -> None:
    """Requests that end, in parts or as they wait, leave no trace; all others get a turn."""
    turns = ReplicaTurns()
    turns.capacity = 3
    asked: list[Turn] = []
    for tenant, weight, end in steps:
        asked.append(Turn(tenant, weight))
        turns.ask(asked[-1])
        turns.give()
        for turn in asked[:end]:
            turns.done(turn, 1)
        if end == 3:
            turns.done(asked.pop())
        turns.give()
    for _ in range(sum(weight for _, weight, _ in steps) + 1):
        for turn in [item for item in asked if item.is_given]:
            turns.done(turn)
        turns.give()
    assert all(turn.is_given or not turn.weight for turn in asked)
    assert turns.is_empty


async def test_turn_comes_when_another_is_over_and_fails_when_the_replica_leaves() -> None:
    """Who waits goes on as soon as there is a place; where the replica is gone it hears so, and who runs does not."""
    turns = Turns(waiting_per_tenant=8)
    with turns.place(REPLICA, 'a', 5) as running, turns.place(REPLICA, 'a', 1) as waiting:
        assert (running.is_given, waiting.is_given) == (True, False)
        coming = asyncio.ensure_future(waiting.turn())
        await asyncio.sleep(0)
        running.done(1)
        await coming
        with turns.place(REPLICA, 'a', 1) as late:
            turns.keep_only({'r-2'})
            with pytest.raises(Draining):
                await late.turn()
        await running.turn()
    with turns.place(REPLICA, 'b', 9) as anew:
        assert anew.is_given


async def test_place_that_is_left_while_it_waits_is_nobodys() -> None:
    """A caller that goes away leaves no turn behind."""
    turns = Turns(waiting_per_tenant=8)
    with turns.place(REPLICA, 'a', 5):
        with turns.place(REPLICA, 'a', 100) as gone:
            assert not gone.is_given
        with turns.place(REPLICA, 'a', 1) as waiting:
            coming = asyncio.ensure_future(waiting.turn())
            await asyncio.sleep(0)
            coming.cancel()
    with turns.place(REPLICA, 'a', 1) as last:
        assert last.is_given


async def test_tenant_has_no_more_waiting_than_it_may() -> None:
    """One beyond is refused and leaves nothing behind; another tenant's is not."""
    turns = Turns(waiting_per_tenant=1)
    with turns.place(REPLICA, 'a', 5), turns.place(REPLICA, 'a', 1), turns.place(REPLICA, 'b', 5):
        for _ in range(2):
            with pytest.raises(QueueFull), turns.place(REPLICA, 'a', 1):
                pass
        with turns.place(REPLICA, 'b', 1) as other:
            assert not other.is_given
