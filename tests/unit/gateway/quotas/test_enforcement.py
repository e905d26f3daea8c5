"""Limits of tenants: the quota that applies, calls that wait, and calls that are refused."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.gateway_entries import CHECKPOINT
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_service_pb2
from twinkle_services.gateway.catalogue.sql import SqlCheckpointStore
from twinkle_services.gateway.fleet.upstreams import ModelChannels
from twinkle_services.gateway.futures.capacity import FutureCapacity
from twinkle_services.gateway.futures.grpc import GrpcTrainer
from twinkle_services.gateway.futures.rules import Bounds, Future, FutureRequest
from twinkle_services.gateway.quotas.enforcement import QuotaTable, SamplingGate, TokenRates, TrainingLimits
from twinkle_services.gateway.quotas.grpc import refused_creation
from twinkle_services.gateway.quotas.rules import Quota, TokenBucket
from twinkle_services.gateway.quotas.sql import SqlQuotaStore, SqlUsageStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import InvalidField, QueueFull, QuotaExceeded, ServiceUnreachable

START = datetime(2026, 1, 1, tzinfo=UTC)


class Harness:
    """All limits of tenants with the given default quota. The clock advances only while a call waits."""

    def __init__(self, database: Database, **default: Any) -> None:
        self.clock, self.waited = FakeClock(), 0.0
        self.store, self.checkpoints = SqlQuotaStore(database), SqlCheckpointStore(database)
        self.table = QuotaTable(self.store, default=Quota(**default))
        self.rates = TokenRates(self.table, clock=self.clock, pause=self.pause)
        self.gate = SamplingGate(self.table, self.rates, patience=timedelta(seconds=5))
        self.census, self.datasets = FakeCensus(), FakeDatasets()
        self.training = TrainingLimits(self.table, self.rates, SqlUsageStore(database), self.census, self.datasets)

    async def save(self, run_id: str, size_bytes: int) -> None:
        """Store a checkpoint of a run of alice, in place of the run's earlier one."""
        await self.checkpoints.save(replace(CHECKPOINT, checkpoint_id=run_id, run_id=run_id, size_bytes=size_bytes))

    async def pause(self, seconds: float) -> None:
        """Advance the clock."""
        self.waited += seconds
        self.clock.advance(timedelta(seconds=seconds))
        await asyncio.sleep(0)


class FakeDatasets:
    """Fake data service that stores the same size for all tenants. It is unreachable while the size is unset."""

    size_bytes: int | None = 0

    async def stored_bytes(self, tenant_id: str) -> int:
        del tenant_id
        await asyncio.sleep(0)
        if self.size_bytes is None:
            raise ServiceUnreachable('data')
        return self.size_bytes


class FakeCensus:
    """Fake adapter census with the same adapters for all tenants. It counts its calls."""

    def __init__(self) -> None:
        self.existing: set[str] = set()
        self.call_count = 0

    async def adapter_ids(self, tenant_id: str) -> Collection[str]:
        del tenant_id
        self.call_count += 1
        await asyncio.sleep(0)
        return set(self.existing)


class RecordChannel:
    """Fake channel to a model service that records serialized requests and returns empty responses."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []

    def trainer(self, harness: Harness) -> GrpcTrainer:
        """Return a trainer that calls this channel within the limits of a harness."""
        channels: Any = {'model': self}
        return GrpcTrainer(ModelChannels(None, channels), harness.training, internal_token='')

    def unary_unary(self, method: str) -> Any:
        """Return the stub of any method."""
        del method

        async def call(request: bytes, **options: Any) -> bytes:
            del options
            self.requests.append(request)
            return b''

        return call


class WaitingChannel(RecordChannel):
    """Fake channel whose calls wait for the test, and then add an adapter to a census."""

    def __init__(self, census: FakeCensus) -> None:
        super().__init__()
        self.continued = asyncio.Event()
        self._census = census

    def unary_unary(self, method: str) -> Any:
        """Return the stub of any method."""
        record = super().unary_unary(method)

        async def call(request: bytes, **options: Any) -> bytes:
            response = await record(request, **options)
            await self.continued.wait()
            self._census.existing.add(f'ad-{len(self.requests)}')
            return response

        return call


def saving(name: str, *, limit: int | None = None) -> bytes:
    """Return a serialized save operation; a limit marks it as refused."""
    operation = operation_pb2.Operation(save=operation_pb2.Save(name=name, stored_bytes_limit=limit))
    return training_service_pb2.ExecuteRequest(operation=operation).SerializeToString()


def creation(request_id: str, *, limit: int | None = None) -> bytes:
    """Return a serialized creation of an adapter; a limit marks it as refused."""
    request = adapter_service_pb2.CreateAdapterRequest(request_id=request_id, adapters_limit=limit)
    return request.SerializeToString()


async def test_quota_of_a_tenant_overrides_the_default_quota(database: Database) -> None:
    """A tenant's limits override the defaults, unset limits keep them, and `read` loads changes by other gateways."""
    harness = Harness(database, max_adapters=4, weight=2.0)
    assert harness.table.of('alice') == Quota(max_adapters=4, weight=2.0)
    await harness.table.put('alice', Quota(max_adapters=0, stored_bytes=5))
    assert harness.table.of('alice') == Quota(max_adapters=0, stored_bytes=5, weight=2.0)
    assert harness.table.of('bob') == Quota(max_adapters=4, weight=2.0)
    other = QuotaTable(harness.store, default=Quota())
    await other.read()
    assert other.of('alice') == Quota(max_adapters=0, stored_bytes=5)
    assert (other.weight_of('alice'), harness.table.weight_of('alice')) == (1.0, 2.0)


@given(
    charges=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 500)), max_size=60),
    rate=st.integers(1, 100),
    burst=st.integers(1, 1000),
)
def test_token_bucket_bounds_the_tokens_that_are_used(charges: list[tuple[float, int]], rate: int, burst: int) -> None:
    """A tenant that only sends requests while it has no debt uses at most burst, refill and its largest request."""
    bucket, now, used, largest = TokenBucket(rate=rate, burst=burst, now=0.0), 0.0, 0, 0
    for pause, count in charges:
        now += pause
        if bucket.seconds_until_free(now=now) > 0:
            continue
        bucket.charge(count, now=now)
        used, largest = used + count, max(largest, count)
        assert used <= burst + rate * now + largest + 1e-6
    assert bucket.seconds_until_free(now=now + 1e6) == 0.0


async def test_small_debt_waits_and_large_debt_is_refused(database: Database) -> None:
    """A call waits if its debt is repaid within its patience; otherwise the refusal has the quota and a retry time."""
    harness = Harness(database, tokens_per_second=10, burst_tokens=20)
    harness.rates.charge('alice', 20)
    await harness.rates.enter('alice', patience_seconds=0.0)
    harness.rates.charge('alice', 30)
    await harness.rates.enter('alice', patience_seconds=5.0)
    assert harness.waited == pytest.approx(3.0, abs=0.1)
    harness.rates.charge('alice', 100)
    with pytest.raises(QuotaExceeded) as refused:
        await harness.rates.enter('alice', patience_seconds=5.0)
    assert (refused.value.quota, refused.value.limit) == ('tokens_per_second', 10)
    assert refused.value.retry_after == timedelta(seconds=10)
    await harness.rates.enter('bob', patience_seconds=0.0)
    await harness.rates.enter('alice', patience_seconds=None)
    assert harness.rates.seconds_until_free('alice') == 0.0


async def test_raised_quota_takes_effect_at_once(database: Database) -> None:
    """A raised rate also shortens the wait of a call that already waits."""
    harness = Harness(database, tokens_per_second=1, burst_tokens=1)

    async def pause(seconds: float) -> None:
        await harness.pause(seconds)
        await harness.table.put('alice', Quota(tokens_per_second=10_000))

    rates = TokenRates(harness.table, clock=harness.clock, pause=pause)
    rates.charge('alice', 3601)
    await rates.enter('alice', patience_seconds=None)
    assert harness.waited < 10
    await harness.table.put('bob', Quota())
    unlimited = Harness(database)
    unlimited.rates.charge('alice', 1 << 60)
    assert unlimited.rates.seconds_until_free('alice') == 0.0


async def test_concurrent_sampling_requests_are_limited(database: Database) -> None:
    """A request over its tenant's quota is refused with a retry time, until another request of the tenant finishes."""
    harness = Harness(database, concurrent_samples=2)
    async with harness.gate.admitted('alice', deadline=None), harness.gate.admitted('alice', deadline=None):
        with pytest.raises(QuotaExceeded) as refused:
            async with harness.gate.admitted('alice', deadline=None):
                raise AssertionError('the request was admitted')
        assert (refused.value.quota, refused.value.limit) == ('concurrent_samples', 2)
        assert refused.value.retry_after is not None
        async with harness.gate.admitted('bob', deadline=None):
            pass
    async with harness.gate.admitted('alice', deadline=None):
        assert harness.gate.count('alice') == 1
    assert harness.gate.count('alice') == 0


def future_of(number: int, tenant_id: str = 'alice', *, kind: str = 'sample') -> Future:
    """Return a future of the given kind."""
    request = FutureRequest(kind=kind, key=str(number), payload=b'', session_id='')
    return Future.accepted(request, tenant_id=tenant_id, moment=START)


async def test_sampling_futures_count_together_with_direct_calls(database: Database) -> None:
    """Sampling futures and direct calls share a quota, which never refuses futures that were already accepted."""
    harness = Harness(database, concurrent_samples=2)
    capacity = FutureCapacity(Bounds(per_tenant=9, total=9), gate=harness.gate)
    capacity.enter(future_of(0))
    capacity.enter(future_of(0))
    capacity.enter(future_of(1, kind='execute'))
    async with harness.gate.admitted('alice', deadline=None):
        with pytest.raises(QuotaExceeded):
            capacity.enter(future_of(2))
        capacity.enter_accepted(future_of(3))
    capacity.leave(future_of(3))
    capacity.leave(future_of(0))
    assert harness.gate.count('alice') == 1
    capacity.leave(future_of(0))
    assert harness.gate.count('alice') == 0
    capacity.enter(future_of(2))


async def test_sample_refused_by_the_queue_uses_no_quota(database: Database) -> None:
    """A sampling future that the queue refuses does not count as in flight."""
    harness = Harness(database, concurrent_samples=5)
    capacity = FutureCapacity(Bounds(per_tenant=1, total=1), gate=harness.gate)
    capacity.enter(future_of(0))
    with pytest.raises(QueueFull):
        capacity.enter(future_of(1))
    assert harness.gate.count('alice') == 1


async def test_sampling_futures_of_a_tenant_in_debt_are_refused(database: Database) -> None:
    """A sampling future of a tenant in debt is refused with a retry time; other futures are accepted."""
    harness = Harness(database, tokens_per_second=10)
    capacity = FutureCapacity(Bounds(per_tenant=9, total=9), gate=harness.gate)
    harness.rates.charge('alice', 150)
    with pytest.raises(QuotaExceeded) as refused:
        capacity.enter(future_of(0))
    assert refused.value.retry_after == timedelta(seconds=5)
    capacity.enter(future_of(0, kind='execute'))


async def test_concurrent_creations_stop_at_the_adapter_limit(database: Database) -> None:
    """A tenant's creations run one at a time, and each creation beyond the limit is marked with the limit."""
    harness = Harness(database, max_adapters=2)
    census = harness.census
    census.existing.add('ad-0')

    async def create(number: int) -> int | None:
        async with harness.training.creating('alice') as limit:
            await asyncio.sleep(0)
            if limit is None:
                census.existing.add(f'new-{number}')
            return limit

    assert sorted(str(limit) for limit in await asyncio.gather(*(create(number) for number in range(4)))) == [
        *['2'] * 3,
        'None',
    ]
    census.existing.clear()
    assert await create(10) is None


async def test_adapters_are_not_counted_without_an_adapter_quota(database: Database) -> None:
    """The adapters of a tenant without an adapter quota are not listed."""
    harness = Harness(database)
    async with harness.training.creating('alice') as limit:
        assert (limit, harness.census.call_count) == (None, 0)


async def test_creations_of_futures_at_the_adapter_limit_carry_the_limit(database: Database) -> None:
    """A creation at the adapter limit still reaches the model service, marked with the limit."""
    harness, channel = Harness(database, max_adapters=1), RecordChannel()
    trainer = channel.trainer(harness)
    await trainer.create_adapter('alice', creation('one'), request_id='f1')
    harness.census.existing.add('ad-1')
    await trainer.create_adapter('alice', creation(''), request_id='f2')
    assert channel.requests == [creation('one'), creation('f2', limit=1)]


async def test_creations_of_futures_wait_for_each_other(database: Database) -> None:
    """The adapters are counted for a creation once the tenant's previous creation has finished."""
    harness = Harness(database, max_adapters=1)
    channel = WaitingChannel(harness.census)
    trainer = channel.trainer(harness)
    creations = [
        asyncio.create_task(trainer.create_adapter('alice', creation(name), request_id='')) for name in ('one', 'two')
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    assert channel.requests == [creation('one')]
    channel.continued.set()
    await asyncio.gather(*creations)
    assert channel.requests == [creation('one'), creation('two', limit=1)]


@pytest.mark.parametrize('fields', [{}, {'request_id': 'r'}, {'adapters_limit': 99, 'user_metadata': {'a': 'b'}}])
def test_marked_creation_differs_only_in_the_limit(fields: dict[str, Any]) -> None:
    """A limit that the client sent is replaced, and bytes that are not a valid request are refused."""
    request = adapter_service_pb2.CreateAdapterRequest(**fields)
    marked = adapter_service_pb2.CreateAdapterRequest.FromString(refused_creation(request.SerializeToString(), 3))
    assert marked.adapters_limit == 3
    marked.ClearField('adapters_limit')
    request.ClearField('adapters_limit')
    assert marked == request
    # A field that claims more bytes than follow would absorb the appended field.
    cut = adapter_service_pb2.CreateAdapterRequest(request_id='r' * 9).SerializeToString()[:-2]
    with pytest.raises(InvalidField):
        refused_creation(cut, 3)


async def test_operations_of_futures_wait_and_saves_are_marked(database: Database) -> None:
    """An operation of a tenant in debt waits, and a save at the storage limit is marked with the limit."""
    harness, channel = Harness(database, tokens_per_second=10, stored_bytes=100), RecordChannel()
    trainer = channel.trainer(harness)
    step = training_service_pb2.ExecuteRequest(operation=operation_pb2.Operation(adapter_id='ad-1'))
    harness.rates.charge('alice', 1100)
    await trainer.execute('alice', saving('1'), number=1)
    assert harness.waited == pytest.approx(100.0, abs=1.0)
    await harness.save('run', 99)
    await trainer.execute('alice', saving('2'), number=2)
    await harness.save('other', 1)
    await trainer.execute('alice', saving('3'), number=3)
    await trainer.execute('alice', step.SerializeToString(), number=4)
    await trainer.execute('bob', saving('5'), number=5)
    sent = [training_service_pb2.ExecuteRequest.FromString(request).operation for request in channel.requests]
    assert [operation.sequence_number for operation in sent] == [1, 2, 3, 4, 5]
    assert [operation.save.name for operation in sent] == ['1', '2', '3', '', '5']
    limits = [item.save.stored_bytes_limit for item in sent if item.save.HasField('stored_bytes_limit')]
    assert limits == [100]
    assert sent[2].save.stored_bytes_limit == 100


async def test_storage_limit_of_zero_refuses_all_storage(database: Database) -> None:
    """A limit of zero refuses even a tenant that stores nothing."""
    harness = Harness(database, stored_bytes=0)
    with pytest.raises(QuotaExceeded) as refused:
        await harness.training.check_storage('alice')
    assert (refused.value.quota, refused.value.limit, refused.value.retry_after) == ('stored_bytes', 0, None)


async def test_datasets_count_as_storage_while_their_service_is_reachable(database: Database) -> None:
    """Checkpoints and datasets count together; if the size of the datasets is unknown, checkpoints alone count."""
    harness = Harness(database, stored_bytes=100)
    await harness.save('run', 60)
    harness.datasets.size_bytes = 39
    await harness.training.check_storage('alice')
    harness.datasets.size_bytes = 40
    with pytest.raises(QuotaExceeded):
        await harness.training.check_storage('alice')
    harness.datasets.size_bytes = None
    await harness.training.check_storage('alice')
    await harness.save('run', 100)
    with pytest.raises(QuotaExceeded):
        await harness.training.check_storage('alice')


async def test_requests_in_flight_are_counted_until_they_leave(database: Database) -> None:
    """A request that entered twice is in flight until it has left twice; unknown requests are ignored."""
    gate = Harness(database, concurrent_samples=1).gate
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


def test_limit_of_zero_overrides_the_default() -> None:
    """A limit of zero applies and is not replaced by the default."""
    default = Quota(max_adapters=3, concurrent_samples=4)
    zero = Quota(max_adapters=0, concurrent_samples=0)
    assert replace(zero.over(default), weight=None) == Quota(max_adapters=0, concurrent_samples=0)
