"""The queue of futures that are ready to start: fair shares, slots per base model, and rate-limited tenants."""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.futures import BOUNDS, Recorder, running_futures
from twinkle_services.gateway.futures.capacity import MAX_QUEUES, FutureQueue
from twinkle_services.gateway.futures.rules import Bounds, Future, FutureRequest

MIB = 1 << 20
START = datetime(2026, 1, 1, tzinfo=UTC)
TEMPLATE = Future.accepted(FutureRequest(kind='k', key='', payload=b'', session_id=''), tenant_id='', moment=START)


def future_of(tenant_id: str, number: int, *, base_model: str = '') -> Future:
    """Return a tenant's future."""
    return replace(TEMPLATE, tenant_id=tenant_id, future_id=f'{tenant_id}-{number}', base_model=base_model)


def served(
    weights: Mapping[str, float], *, total: int, starts: int, lengths: Mapping[str, int] | None = None
) -> Counter[str]:
    """Return how often each tenant's futures started while all tenants had more futures in the queue.

    Args:
        weights: Weights of the tenants.
        total: Number of slots.
        starts: Total number of futures to start.
        lengths: Duration of each tenant's futures, in steps; the default is one step.
    """
    queue = FutureQueue(Bounds(per_tenant=total, total=total), weight_of=weights.__getitem__)
    for number in range(starts):
        for tenant in weights:
            queue.add(future_of(tenant, number))
    counts, running, remaining = Counter[str](), deque[tuple[int, Future]](), starts
    for step in range(starts * 100):
        for end, future in [item for item in running if item[0] <= step]:
            running.remove((end, future))
            queue.release(future)
        while remaining and (future := queue.take()) is not None:
            remaining -= 1
            counts[future.tenant_id] += 1
            running.append((step + (lengths or {}).get(future.tenant_id, 1), future))
        if not remaining:
            return counts
    raise AssertionError('a tenant never got a slot')


@pytest.mark.parametrize('total', [1, 2, 3, 4, 16, 64])
@pytest.mark.parametrize('lengths', [None, {'light': 1, 'heavy': 7}, {'light': 7, 'heavy': 1}])
def test_tenant_of_weight_three_starts_three_times_as_often(total: int, lengths: Mapping[str, int] | None) -> None:
    """Starts follow the weights with a tolerance of a tenth, for any number of slots and any duration of futures."""
    counts = served({'light': 1.0, 'heavy': 3.0}, total=total, starts=800, lengths=lengths)
    assert 2.7 <= counts['heavy'] / counts['light'] <= 3.3, counts


@settings(max_examples=40)
@given(weights=st.lists(st.integers(1, 10), min_size=2, max_size=6), total=st.integers(1, 9))
def test_every_tenant_gets_about_its_weighted_share(weights: list[int], total: int) -> None:
    """A tenant's starts differ from its weighted share by at most two plus its weight divided by the least weight."""
    named = {f't{index}': float(weight) for index, weight in enumerate(weights)}
    starts = 12 * sum(weights)
    counts = served(named, total=total, starts=starts)
    for tenant, weight in named.items():
        share = starts * weight / sum(weights)
        assert abs(counts[tenant] - share) <= 2 + weight / min(weights), counts


def test_idle_tenant_accumulates_no_share() -> None:
    """A tenant that was idle for a long time is not served ahead of all others when it returns."""
    queue = FutureQueue(Bounds(per_tenant=1, total=1))
    for number in range(300):
        queue.add(future_of('busy', number))
    for number in range(100):
        future = queue.take()
        assert future is not None, number
        queue.release(future)
    for number in range(100):
        queue.add(future_of('returning', number))
    order: list[str] = []
    for _ in range(20):
        future = queue.take()
        assert future is not None
        order.append(future.tenant_id)
        queue.release(future)
    assert Counter(order) == {'busy': 10, 'returning': 10}


def test_tenant_with_one_request_at_a_time_gets_its_weight() -> None:
    """A tenant that submits each request only after its previous request is done gets its weighted share."""
    weights = {'single': 1.0, 'heavy': 3.0}
    queue = FutureQueue(Bounds(per_tenant=1, total=1), weight_of=weights.__getitem__)
    for number in range(1000):
        queue.add(future_of('heavy', number))
    queue.add(future_of('single', 0))
    counts = Counter[str]()
    for number in range(400):
        future = queue.take()
        assert future is not None
        counts[future.tenant_id] += 1
        queue.release(future)
        if future.tenant_id == 'single':
            queue.add(future_of('single', number + 1))
    assert 2.7 <= counts['heavy'] / counts['single'] <= 3.3, counts


@given(
    arrivals=st.lists(st.sampled_from(['alice', 'bob', 'carol']), max_size=40),
    per_tenant=st.integers(1, 4),
    total=st.integers(1, 6),
    releases=st.lists(st.integers(0, 5), max_size=80),
)
def test_slots_are_bounded_and_all_futures_start(
    arrivals: list[str], per_tenant: int, total: int, releases: list[int]
) -> None:
    """Each tenant uses at most its slots, all futures start, and a tenant's futures start in order of arrival."""
    queue = FutureQueue(Bounds(per_tenant=per_tenant, total=total))
    running, started, order = list[Future](), list[int](), iter(releases)
    futures = [future_of(owner, index) for index, owner in enumerate(arrivals)]
    for future in futures:
        queue.add(future)
    while len(started) < len(arrivals):
        while (future := queue.take()) is not None:
            running.append(future)
            started.append(futures.index(future))
            assert len(running) <= total
            assert sum(item.tenant_id == future.tenant_id for item in running) <= per_tenant
        queue.release(running.pop(next(order, 0) % len(running)))
    for owner in set(arrivals):
        numbers = [number for number in started if arrivals[number] == owner]
        assert numbers == sorted(numbers)


def test_tenant_with_few_futures_waits_for_one_slot_at_most() -> None:
    """The next free slot goes to the tenant with one future, ahead of another tenant's thousand futures."""
    queue = FutureQueue(Bounds(per_tenant=4, total=4))
    for number in range(1000):
        queue.add(future_of('alice', number))
    [first, *_] = [queue.take() for _ in range(4)]
    queue.add(future_of('bob', 0))
    assert queue.take() is None
    assert first is not None
    queue.release(first)
    assert queue.take() == future_of('bob', 0)


def test_held_tenant_is_skipped_and_keeps_its_order() -> None:
    """A rate-limited tenant is skipped, and its futures start later in order of arrival."""
    held = {'alice'}
    queue = FutureQueue(Bounds(per_tenant=2, total=2), is_rate_limited=held.__contains__)
    for number in range(2):
        queue.add(future_of('alice', number))
    assert queue.take() is None
    assert queue.has_rate_limited_tenant
    queue.add(future_of('bob', 0))
    assert queue.take() == future_of('bob', 0)
    queue.release(future_of('bob', 0))
    held.clear()
    assert not queue.has_rate_limited_tenant
    assert [queue.take(), queue.take()] == [future_of('alice', 0), future_of('alice', 1)]


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(['tiny', 'small', '']), st.sampled_from(['alice', 'bob'])), max_size=30
    ),
    releases=st.lists(st.integers(0, 5), max_size=60),
)
def test_slots_are_counted_by_base_model(arrivals: list[tuple[str, str]], releases: list[int]) -> None:
    """Each base model uses at most its slots, all futures start, and unused queues are deleted."""
    queue, running, order = FutureQueue(Bounds(per_tenant=2, total=3)), list[Future](), iter(releases)
    for index, (base_model, tenant) in enumerate(arrivals):
        queue.add(future_of(tenant, index, base_model=base_model))
    started = 0
    while started < len(arrivals):
        while (future := queue.take()) is not None:
            running.append(future)
            started += 1
            same_model = [item for item in running if item.base_model == future.base_model]
            assert len(same_model) <= 3
            assert sum(item.tenant_id == future.tenant_id for item in same_model) <= 2
        queue.release(running.pop(next(order, 0) % len(running)))
    for future in running:
        queue.release(future)
    assert len(queue) == 0


def test_future_does_not_wait_for_another_base_model() -> None:
    """A future starts immediately although all slots of another base model are in use."""
    queue = FutureQueue(Bounds(per_tenant=2, total=2))
    for index in range(10):
        queue.add(future_of('alice', index, base_model='tiny'))
    while queue.take() is not None:
        pass
    other = future_of('alice', 10, base_model='small')
    queue.add(other)
    assert queue.take() == other


def test_removed_future_does_not_start() -> None:
    """Removing a waiting future succeeds once; running and absent futures are not removed."""
    queue = FutureQueue(Bounds(per_tenant=2, total=2))
    first, second = future_of('alice', 1, base_model='tiny'), future_of('alice', 2, base_model='small')
    queue.add(first)
    queue.add(second)
    assert queue.remove(first)
    assert not queue.remove(first)
    assert queue.take() == second
    assert not queue.remove(second)
    queue.release(second)
    assert len(queue) == 0


def test_number_of_queues_is_bounded() -> None:
    """Base models beyond the bound share one queue, and all their futures start."""
    queue = FutureQueue(Bounds(per_tenant=1, total=1))
    futures = [future_of('alice', index, base_model=f'made-up-{index}') for index in range(2 * MAX_QUEUES)]
    for future in futures:
        queue.add(future)
    assert len(queue) <= MAX_QUEUES + 1
    taken: set[str] = set()
    while (future := queue.take()) is not None:
        taken.add(future.future_id)
        queue.release(future)
    assert taken == {future.future_id for future in futures}


@dataclass
class _StalledModel(Recorder):
    """An executor that never finishes a future of the base model 'stalled'."""

    blocked: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        if future.base_model == 'stalled':
            self.started.append(future.key)
            await self.blocked.wait()
        return await super().__call__(future, payload)


async def test_stalled_base_model_does_not_starve_another_one() -> None:
    """Futures run although another base model's futures never release their slots, in lanes and outside lanes."""
    for has_lanes in (True, False):
        async with running_futures(_StalledModel()) as gateway:
            for index in range(3 * BOUNDS.per_tenant):
                await gateway.submit(f'stalled-{index}', lane=f'ad-{index}' if has_lanes else '', base_model='stalled')
            for index in range(3):
                lane = 'ad-working' if has_lanes else ''
                future = await gateway.submit(f'{index}', lane=lane, position=index, base_model='working')
                assert await gateway.outcome(future) == f'{index}'.encode()


def test_base_model_is_not_part_of_the_fingerprint() -> None:
    """A repeated request matches its future, even if the base model was unknown at one of the two requests."""
    future = future_of('alice', 1)
    replace(future, base_model='tiny').check_repeat(future.fingerprint)


async def test_held_tenants_use_no_slots_and_continue_later() -> None:
    """Rate-limited tenants with more lanes than slots do not delay other tenants, and run once their limit ends."""
    held = {'alice', 'carol'}
    async with running_futures(Recorder(held_tenants=held)) as gateway:
        held_futures = list[Future]()
        for tenant in sorted(held):
            gateway.acting_as(tenant)
            held_futures += [await gateway.submit(f'{tenant}{n}', lane=f'ad-{n}') for n in range(BOUNDS.total)]
        gateway.acting_as('bob')
        for position in range(3):
            assert await gateway.outcome(await gateway.submit(f'b{position}', lane='ad-b', position=position))
        assert gateway.recorder.started == ['b0', 'b1', 'b2']
        held.clear()
        for future in held_futures:
            gateway.acting_as(future.tenant_id)
            assert await gateway.outcome(future) == future.key.encode()[::-1]


async def test_held_futures_run_in_the_next_process() -> None:
    """A closed gateway starts no future of a rate-limited tenant; the next process runs the future."""
    held = {'alice'}
    async with running_futures(Recorder(held_tenants=held)) as gateway:
        future = await gateway.submit('one', lane='ad-1')
    held.clear()
    for _ in range(5):
        await asyncio.sleep(0)
    assert gateway.recorder.started == []
    async with running_futures(stores=(gateway.store, gateway.payloads)) as after:
        assert await after.outcome(future) == b'eno'


@dataclass
class _VersionPublisher(Recorder):
    """An executor whose samples wait until a training step has published their version."""

    published: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        if future.lane:
            self.published.set()
            return await super().__call__(future, payload)
        self.started.append(future.key)
        self.arrived.set()
        await self.published.wait()
        return payload


async def test_samples_that_wait_for_a_version_leave_memory_for_its_training_step() -> None:
    """A training step runs although waiting samples use all the memory that the tenant's samples may use."""
    async with running_futures(_VersionPublisher(), running_bytes=4 * MIB) as gateway:
        samples = [await gateway.submit(f's{n}', payload=bytes(MIB)) for n in range(5)]
        await gateway.recorder.has_started(3)
        step = await gateway.submit('step', payload=bytes(MIB), lane='ad-1')
        assert await gateway.outcome(step) == bytes(MIB)
        for future in samples:
            assert await gateway.outcome(future) == bytes(MIB)
