"""Turns by weight: what tenants get who all have more waiting than there are places."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.futures.rules import Future, FutureOrder
from services.gateway.sampling.fair_queue import FairQueue, Places
from services.gateway.sampling.fair_shares import FairShares, equal_weight

START = datetime(2026, 1, 1, tzinfo=UTC)
TEMPLATE = Future.accepted(FutureOrder(kind='k', key='', payload=b'', session_id=''), tenant_id='', moment=START)


def future_of(tenant_id: str, number: int) -> Future:
    """Return a tenant's future."""
    return replace(TEMPLATE, tenant_id=tenant_id, future_id=f'{tenant_id}-{number}')


def served(
    weights: Mapping[str, float], *, total: int, turns: int, lengths: Mapping[str, int] | None = None
) -> Counter:
    """Return how often each tenant was served while all had more waiting.

    Args:
        weights: of the tenants.
        total: places.
        turns: turns given in all.
        lengths: for how many turns of others a tenant's future runs; by default all end in the order they began.
    """
    queue = FairQueue(Places(tenant=total, total=total), weight_of=weights.__getitem__)
    for number in range(turns):
        for tenant in weights:
            queue.add(future_of(tenant, number))
    counts, running, left = Counter[str](), deque[tuple[int, str]](), turns
    for moment in range(turns * 100):
        for end, tenant in [item for item in running if item[0] <= moment]:
            running.remove((end, tenant))
            queue.give_back(tenant)
        while left and (future := queue.take()) is not None:
            left -= 1
            counts[future.tenant_id] += 1
            running.append((moment + (lengths or {}).get(future.tenant_id, 1), future.tenant_id))
        if not left:
            return counts
    raise AssertionError('somebody never got a turn')


@pytest.mark.parametrize('total', [1, 2, 3, 4, 16, 64])
@pytest.mark.parametrize('lengths', [None, {'light': 1, 'heavy': 7}, {'light': 7, 'heavy': 1}])
def test_one_of_weight_three_is_served_three_times_as_often(total: int, lengths: Mapping[str, int] | None) -> None:
    """Within a tenth, however many places there are, and however long each one's requests take."""
    counts = served({'light': 1.0, 'heavy': 3.0}, total=total, turns=800, lengths=lengths)
    assert 2.7 <= counts['heavy'] / counts['light'] <= 3.3, counts


@settings(deadline=None, max_examples=40)
@given(
    weights=st.lists(st.integers(1, 10), min_size=2, max_size=6),
    total=st.integers(1, 9),
)
def test_every_tenant_gets_its_part_to_within_two_turns(weights: list[int], total: int) -> None:
    """Whatever the weights are: nobody is ever behind by more."""
    named = {f't{index}': float(weight) for index, weight in enumerate(weights)}
    turns = 12 * sum(weights)
    counts = served(named, total=total, turns=turns)
    for tenant, weight in named.items():
        part = turns * weight / sum(weights)
        assert abs(counts[tenant] - part) <= 2 + weight / min(weights), counts


def test_nobody_saves_up_turns() -> None:
    """One that had nothing waiting for long is not served before all others when it comes back."""
    queue = FairQueue(Places(tenant=1, total=1))
    for number in range(300):
        queue.add(future_of('busy', number))
    for number in range(100):
        assert queue.take() is not None, number
        queue.give_back('busy')
    for number in range(100):
        queue.add(future_of('back', number))
    order: list[str] = []
    for _ in range(20):
        future = queue.take()
        assert future is not None
        order.append(future.tenant_id)
        queue.give_back(future.tenant_id)
    assert Counter(order) == {'busy': 10, 'back': 10}


def test_one_request_at_a_time_has_the_weight_of_its_tenant() -> None:
    """A tenant that sends its next request once the last one is done gets no more than its part."""
    weights = {'single': 1.0, 'heavy': 3.0}
    queue = FairQueue(Places(tenant=1, total=1), weight_of=weights.__getitem__)
    for number in range(1000):
        queue.add(future_of('heavy', number))
    queue.add(future_of('single', 0))
    counts = Counter[str]()
    for number in range(400):
        future = queue.take()
        assert future is not None
        counts[future.tenant_id] += 1
        queue.give_back(future.tenant_id)
        if future.tenant_id == 'single':
            queue.add(future_of('single', number + 1))
    assert 2.7 <= counts['heavy'] / counts['single'] <= 3.3, counts


def test_what_tenants_did_is_forgotten_but_for_those_that_are_here() -> None:
    """Shares that a few thousand tenants went through do not remember all of them."""
    shares = FairShares(equal_weight, is_here=lambda name: name == 't0')
    for number in range(5000):
        shares.serve(f't{number}', cost=2.0)
    known = [number for number in range(5000) if shares.begin_of(f't{number}') == 2.0]
    assert known[0] == 0
    assert known[-1] == 4999
    assert len(known) <= 3073
