"""Limits of tenants: which quota applies, which calls wait, and which are refused."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.record_trainer import RecordTrainer
from fixtures.usage_stores import MemoryQuotaStore, MemoryUsageStore
from services.gateway.futures.limits import FutureCapacity, LimitedTrainer
from services.gateway.futures.rules import Bounds, Future, FutureRequest
from services.gateway.quotas.limits import QuotaTable, TokenRates, TrainingLimits
from services.gateway.quotas.requests import refused_creation
from services.gateway.quotas.rules import Quota, TokenBucket
from services.gateway.sampling.limits import SamplingGate
from services.kit.clock import FakeClock
from services.kit.errors import InvalidField, QueueFull, QuotaExceeded
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_service_pb2

START = datetime(2026, 1, 1, tzinfo=UTC)


class World:
    """All limits of tenants with the given default quota, on a clock that advances only while a call waits."""

    def __init__(self, **default: Any) -> None:
        self.clock = FakeClock()
        self.store = MemoryQuotaStore()
        self.table = QuotaTable(self.store, default=Quota(**default))
        self.rates = TokenRates(self.table, clock=self.clock, pause=self.pause)
        self.gate = SamplingGate(self.table, self.rates, patience=timedelta(seconds=5))
        self.usage = MemoryUsageStore()
        self.census = Census()
        self.training = TrainingLimits(self.table, self.rates, self.usage, self.census)
        self.waited = 0.0

    async def pause(self, seconds: float) -> None:
        """Advance the clock."""
        self.waited += seconds
        self.clock.advance(timedelta(seconds=seconds))
        await asyncio.sleep(0)


class Census:
    """Adapters that exist, and the number of times they were listed."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.count = 0

    async def adapter_ids(self, tenant_id: str) -> Collection[str]:
        del tenant_id
        self.count += 1
        await asyncio.sleep(0)
        return set(self.there)


def saving(name: str, *, limit: int | None = None) -> bytes:
    """Return a serialized operation that saves, with the limit that marks it as refused."""
    operation = operation_pb2.Operation(save=operation_pb2.Save(name=name, stored_bytes_limit=limit))
    return training_service_pb2.ExecuteRequest(operation=operation).SerializeToString()


def creation(request_id: str, *, limit: int | None = None) -> bytes:
    """Return a serialized request for an adapter, with the limit that marks it as refused."""
    request = adapter_service_pb2.CreateAdapterRequest(request_id=request_id, adapters_limit=limit)
    return request.SerializeToString()


async def test_quota_of_a_tenant_stands_over_the_default() -> None:
    """Limit by limit; one that is nowhere set is none, and what another gateway sets is read."""
    world = World(max_adapters=4, weight=2.0)
    assert world.table.of('alice') == Quota(max_adapters=4, weight=2.0)
    await world.table.put('alice', Quota(max_adapters=0, stored_bytes=5))
    assert world.table.of('alice') == Quota(max_adapters=0, stored_bytes=5, weight=2.0)
    assert world.table.of('bob') == Quota(max_adapters=4, weight=2.0)
    other = QuotaTable(world.store, default=Quota())
    await other.read()
    assert other.of('alice') == Quota(max_adapters=0, stored_bytes=5)
    assert (other.weight_of('alice'), world.table.weight_of('alice')) == (1.0, 2.0)


@given(
    charges=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 500)), max_size=60),
    rate=st.integers(1, 100),
    burst=st.integers(1, 1000),
)
def test_no_more_is_used_than_comes_in(charges: list[tuple[float, int]], rate: int, burst: int) -> None:
    """Whoever takes only while nothing is owed never has more than burst, rate and the last thing it took."""
    bucket, now, used, largest = TokenBucket(rate=rate, burst=burst, now=0.0), 0.0, 0, 0
    for pause, count in charges:
        now += pause
        if bucket.seconds_until_free(now=now) > 0:
            continue
        bucket.charge(count, now=now)
        used, largest = used + count, max(largest, count)
        assert used <= burst + rate * now + largest + 1e-6
    assert bucket.seconds_until_free(now=now + 1e6) == 0.0


async def test_who_owes_little_waits_and_who_owes_much_is_refused() -> None:
    """The refusal names the quota and when it is paid; then it goes on."""
    world = World(tokens_per_second=10, burst_tokens=20)
    world.rates.charge('alice', 20)
    await world.rates.enter('alice', patience_seconds=0.0)
    world.rates.charge('alice', 30)
    await world.rates.enter('alice', patience_seconds=5.0)
    assert world.waited == pytest.approx(3.0, abs=0.1)
    world.rates.charge('alice', 100)
    with pytest.raises(QuotaExceeded) as refused:
        await world.rates.enter('alice', patience_seconds=5.0)
    assert (refused.value.quota, refused.value.limit) == ('tokens_per_second', 10)
    assert refused.value.retry_after == timedelta(seconds=10)
    await world.rates.enter('bob', patience_seconds=0.0)
    await world.rates.enter('alice', patience_seconds=None)
    assert world.rates.seconds_until_free('alice') == 0.0


async def test_a_quota_that_is_raised_counts_at_once() -> None:
    """Also for who waits already."""
    world = World(tokens_per_second=1, burst_tokens=1)
    world.rates.charge('alice', 3601)
    waiting = asyncio.create_task(world.rates.enter('alice', patience_seconds=None))
    await asyncio.sleep(0)
    await world.table.put('alice', Quota(tokens_per_second=10_000))
    await waiting
    assert world.waited < 10
    await world.table.put('bob', Quota())
    unlimited = World()
    unlimited.rates.charge('alice', 1 << 60)
    assert unlimited.rates.seconds_until_free('alice') == 0.0


async def test_samples_at_a_time() -> None:
    """A request beyond the quota is refused with a retry time, for each tenant separately, until another one ends."""
    world = World(concurrent_samples=2)
    async with world.gate.admitted('alice', deadline=None), world.gate.admitted('alice', deadline=None):
        with pytest.raises(QuotaExceeded) as refused:
            async with world.gate.admitted('alice', deadline=None):
                raise AssertionError('it was admitted')
        assert (refused.value.quota, refused.value.limit) == ('concurrent_samples', 2)
        assert refused.value.retry_after is not None
        async with world.gate.admitted('bob', deadline=None):
            pass
    async with world.gate.admitted('alice', deadline=None):
        assert world.gate.count('alice') == 1
    assert world.gate.count('alice') == 0


def future_of(number: int, tenant_id: str = 'alice', *, kind: str = 'sample') -> Future:
    """Return a future that samples, or of another kind."""
    request = FutureRequest(kind=kind, key=str(number), payload=b'', session_id='')
    return Future.accepted(request, tenant_id=tenant_id, moment=START)


async def test_sampling_futures_count_together_with_direct_calls() -> None:
    """A future in flight is never refused again, and one from before a restart enters even beyond the quota."""
    world = World(concurrent_samples=2)
    capacity = FutureCapacity(Bounds(per_tenant=9, total=9), gate=world.gate)
    capacity.enter(future_of(0))
    capacity.enter(future_of(0))
    capacity.enter(future_of(1, kind='execute'))
    async with world.gate.admitted('alice', deadline=None):
        with pytest.raises(QuotaExceeded):
            capacity.enter(future_of(2))
        capacity.enter_accepted(future_of(3))
    capacity.leave(future_of(3))
    capacity.leave(future_of(0))
    assert world.gate.count('alice') == 1
    capacity.leave(future_of(0))
    assert world.gate.count('alice') == 0
    capacity.enter(future_of(2))


async def test_sample_refused_by_the_queue_uses_no_quota() -> None:
    """A sampling future that the queue refuses is not counted as in flight."""
    world = World(concurrent_samples=5)
    capacity = FutureCapacity(Bounds(per_tenant=1, total=1), gate=world.gate)
    capacity.enter(future_of(0))
    with pytest.raises(QueueFull):
        capacity.enter(future_of(1))
    assert world.gate.count('alice') == 1


async def test_sampling_futures_of_an_owing_tenant_are_refused() -> None:
    """A sampling future of a tenant that owes tokens is refused with the retry time, and other futures are not."""
    world = World(tokens_per_second=10)
    capacity = FutureCapacity(Bounds(per_tenant=9, total=9), gate=world.gate)
    world.rates.charge('alice', 150)
    with pytest.raises(QuotaExceeded) as refused:
        capacity.enter(future_of(0))
    assert refused.value.retry_after == timedelta(seconds=5)
    capacity.enter(future_of(0, kind='execute'))


async def test_of_several_adapters_at_once_as_many_are_made_as_may_be() -> None:
    """Each of a tenant's is let in once the one before is there; what is beyond the limit is told of it."""
    world = World(max_adapters=2)
    census = world.census
    census.there.add('ad-0')

    async def make(number: int) -> int | None:
        async with world.training.creating('alice') as limit:
            await asyncio.sleep(0)
            if limit is None:
                census.there.add(f'new-{number}')
            return limit

    assert sorted(str(limit) for limit in await asyncio.gather(*(make(number) for number in range(4)))) == [
        *['2'] * 3,
        'None',
    ]
    census.there.clear()
    assert await make(10) is None


async def test_without_a_quota_of_adapters_nobody_is_asked_anything() -> None:
    """The common case costs nothing."""
    world = World()
    async with world.training.creating('alice') as limit:
        assert (limit, world.census.count) == (None, 0)


async def test_creations_of_futures_are_marked_where_the_tenant_has_as_many_as_it_may() -> None:
    """They go on all the same: the model service alone knows whether one made its adapter before."""
    world, trainer = World(max_adapters=1), RecordTrainer()
    limited = LimitedTrainer(trainer, world.training)
    await limited.create_adapter('alice', creation('one'), request_id='f1')
    world.census.there.add('ad-1')
    await limited.create_adapter('alice', creation('two'), request_id='f2')
    assert trainer.created == {'f1': creation('one'), 'f2': creation('two', limit=1)}


@pytest.mark.parametrize('fields', [{}, {'request_id': 'r'}, {'adapters_limit': 99, 'user_metadata': {'a': 'b'}}])
def test_a_marked_creation_is_the_same_one_with_a_limit(fields: dict[str, Any]) -> None:
    """What the client itself put there does not count; what is no request is refused."""
    request = adapter_service_pb2.CreateAdapterRequest(**fields)
    marked = adapter_service_pb2.CreateAdapterRequest.FromString(refused_creation(request.SerializeToString(), 3))
    assert marked.adapters_limit == 3
    marked.ClearField('adapters_limit')
    request.ClearField('adapters_limit')
    assert marked == request
    # A field that says to be longer than what is there would take the addition into itself.
    cut = adapter_service_pb2.CreateAdapterRequest(request_id='r' * 9).SerializeToString()[:-2]
    with pytest.raises(InvalidField):
        refused_creation(cut, 3)


async def test_operations_of_futures_wait_and_saves_are_marked() -> None:
    """Who owes tokens waits as long as it takes; a save goes on marked while the storage is full, all others as is."""
    world, trainer = World(tokens_per_second=10, stored_bytes=100), RecordTrainer()
    limited = LimitedTrainer(trainer, world.training)
    step = training_service_pb2.ExecuteRequest(operation=operation_pb2.Operation(sequence_number=4)).SerializeToString()
    world.rates.charge('alice', 1100)
    await limited.execute('alice', saving('1'), number=1)
    assert world.waited == pytest.approx(100.0, abs=1.0)
    world.usage.stored = {'alice': {'run': 99}}
    await limited.execute('alice', saving('2'), number=2)
    world.usage.stored = {'alice': {'run': 99, 'other': 1}}
    await limited.execute('alice', saving('3'), number=3)
    marked = trainer.applied[-1]
    assert training_service_pb2.ExecuteRequest.FromString(marked).operation.save.stored_bytes_limit == 100
    await limited.execute('alice', step, number=4)
    await limited.execute('bob', saving('5'), number=5)
    assert trainer.applied == [saving('1'), saving('2'), marked, step, saving('5')]


async def test_nothing_may_be_stored_where_the_limit_is_zero() -> None:
    """Though nothing is stored."""
    world = World(stored_bytes=0)
    with pytest.raises(QuotaExceeded) as refused:
        await world.training.check_storage('alice')
    assert (refused.value.quota, refused.value.limit, refused.value.retry_after) == ('stored_bytes', 0, None)


async def test_requests_in_flight_are_counted_until_they_left() -> None:
    """A request that entered twice is in flight until it left twice; unknown requests are ignored."""
    gate = World(concurrent_samples=1).gate
    gate.enter('alice', 'one')
    gate.enter('alice', 'one')
    gate.leave('alice', 'other')
    gate.leave('bob', 'one')
    gate.check('alice', 'one')
    assert gate.count('alice') == 1
    gate.leave('alice', 'one')
    assert gate.count('alice') == 1
    gate.leave('alice', 'one')
    assert gate.count('alice') == 0


def test_a_limit_that_is_zero_is_one() -> None:
    """Zero is not taken for unset."""
    default = Quota(max_adapters=3, concurrent_samples=4)
    own = Quota(max_adapters=0, concurrent_samples=0)
    assert replace(own.over(default), weight=None) == Quota(max_adapters=0, concurrent_samples=0)
