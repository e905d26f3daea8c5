"""Contract tests of the stores of quotas and usage, on SQLite and PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from twinkle_services.gateway.catalogue.rules import Checkpoint
from twinkle_services.gateway.catalogue.sql import SqlCheckpointStore
from twinkle_services.gateway.keys.rules import Tenant
from twinkle_services.gateway.keys.sql import SqlTenantStore
from twinkle_services.gateway.metrics.rules import Point, PointLimits
from twinkle_services.gateway.metrics.sql import SqlMetricStore
from twinkle_services.gateway.quotas.rules import Quota, Reading, Usage, UsageBatch, Work
from twinkle_services.gateway.quotas.sql import SqlQuotaStore, SqlUsageStore
from twinkle_services.gateway.store.database import Database

START = datetime(2026, 3, 1, 12, 30, 15, tzinfo=UTC)
FULL = Quota(
    max_adapters=0,
    tokens_per_second=1 << 40,
    burst_tokens=7,
    concurrent_samples=3,
    stored_bytes=1 << 50,
    weight=0.25,
    metric_points=5,
)
"""A quota in which every limit is set."""


@dataclass(frozen=True)
class Stores:
    """Stores of one database, and a second gateway's usage store on the same database."""

    quotas: SqlQuotaStore
    usage: SqlUsageStore
    other_usage: SqlUsageStore


@pytest.fixture
async def stores(database: Database, database_url: str) -> AsyncIterator[Stores]:
    """Yield stores without quotas and usage, for the tenants alice and bob."""
    for name in ('alice', 'bob'):
        await SqlTenantStore(database).add_if_absent(Tenant(tenant_id=name, display_name='', create_time=START))
    second = await Database.open(database_url)
    yield Stores(SqlQuotaStore(database), SqlUsageStore(database), SqlUsageStore(second))
    await second.close()


def batch(number: int, *works: tuple[str, str, Work], writer: str = 'w1', **changes: Any) -> UsageBatch:
    return UsageBatch(**{'writer_id': writer, 'number': number, 'moment': START, 'works': works, **changes})


def reading(tokens: int, operations: int = 1, run_id: str = 'run-1') -> Reading:
    """Return a reading of a run's meter."""
    return Reading(run_id=run_id, tenant_id='alice', trained_token_count=tokens, operation_count=operations)


async def used(store: Any, tenant_id: str = 'alice', **times: Any) -> dict[str, Work]:
    """Return a tenant's usage by run."""
    return {item.run_id: item.work for item in await store.list_of(tenant_id, **{'begin': None, 'end': None, **times})}


async def test_quota_is_replaced_by_the_last_one(stores: Stores) -> None:
    """Storing a quota replaces the tenant's previous quota; unset limits remain unset."""
    await stores.quotas.put('alice', Quota(max_adapters=1, weight=2.0))
    await stores.quotas.put('alice', FULL)
    await stores.quotas.put('bob', Quota())
    assert await stores.quotas.list_all() == {'alice': FULL, 'bob': Quota()}


async def test_work_adds_up_by_tenant_and_run(stores: Stores) -> None:
    """All kinds of work add up per tenant and run; tenants with equal run ids are separate."""
    work = Work(
        trained_token_count=1,
        sampled_token_count=1 << 40,
        prompt_token_count=3,
        operation_count=4,
        prompt_count=5,
    )
    await stores.usage.record(batch(1, ('alice', 'run-1', work), ('alice', '', Work(prompt_token_count=9))))
    await stores.usage.record(batch(2, ('alice', 'run-1', work), ('bob', 'run-1', Work(prompt_count=1))))
    assert await used(stores.usage) == {'': Work(prompt_token_count=9), 'run-1': work + work}
    assert await used(stores.usage, 'bob') == {'run-1': Work(prompt_count=1)}
    assert await used(stores.usage, 'carol') == {}


async def test_repeated_batch_counts_once(stores: Stores) -> None:
    """A batch that is recorded twice counts once; another writer's batch with the same number is a different batch."""
    work = ('alice', 'run-1', Work(prompt_count=1))
    for recorded in (batch(1, work), batch(1, work), batch(2, work), batch(2, work), batch(1, work, writer='w2')):
        await stores.usage.record(recorded)
    assert await used(stores.usage) == {'run-1': Work(prompt_count=3)}
    await stores.usage.forget_writer('w1')
    await stores.usage.forget_writer('unknown')
    assert await used(stores.usage) == {'run-1': Work(prompt_count=3)}


async def test_meter_counts_only_its_increase(stores: Stores) -> None:
    """Repeated and reordered readings of a meter count only its increase."""
    for number, (store, tokens) in enumerate(
        [
            (stores.usage, 10),
            (stores.other_usage, 10),
            (stores.other_usage, 25),
            (stores.usage, 17),
            (stores.usage, 25),
        ],
        1,
    ):
        await store.record(batch(number, writer=f'w{number}', readings=(reading(tokens, tokens // 5),)))
    assert await used(stores.usage) == {'run-1': Work(trained_token_count=25, operation_count=5)}


async def test_two_gateways_count_everything_once(stores: Stores) -> None:
    """Two gateways that add samples and read the same meters at the same time count everything once."""

    async def record_all(store: Any, writer: str) -> None:
        for number in range(1, 21):
            works = tuple(('alice', f'run-{run}', Work(sampled_token_count=1)) for run in (number % 3, 3))
            readings = tuple(reading(10 * number, number, f'run-{run}') for run in range(3))
            await store.record(batch(number, *works, writer=writer, readings=readings))

    await asyncio.gather(record_all(stores.usage, 'w1'), record_all(stores.other_usage, 'w2'))
    found = await used(stores.usage)
    assert {name: (work.trained_token_count, work.operation_count) for name, work in found.items()} == {
        'run-0': (200, 20),
        'run-1': (200, 20),
        'run-2': (200, 20),
        'run-3': (0, 0),
    }
    assert sum(work.sampled_token_count for work in found.values()) == 80
    assert found['run-3'].sampled_token_count == 40


async def test_period_covers_whole_hours(stores: Stores) -> None:
    """A period includes the hours that start in it, but not an hour that starts at its end."""
    for hours in range(3):
        moment = START + timedelta(hours=hours)
        await stores.usage.record(batch(hours + 1, ('alice', '', Work(prompt_count=10**hours)), moment=moment))
    noon = START.replace(minute=0, second=0)

    async def count(**times: Any) -> int:
        return sum(work.prompt_count for work in (await used(stores.usage, **times)).values())

    assert await count() == 111
    assert await count(begin=noon) == 111
    assert await count(begin=START) == 110
    assert await count(begin=noon + timedelta(hours=1), end=noon + timedelta(hours=2)) == 10
    assert await count(end=noon) == 0


async def test_points_of_metrics_are_counted_by_run(database: Database) -> None:
    """The tenant's runs with stored points are listed with the number of points, even without other usage."""
    metrics, usage = SqlMetricStore(database), SqlUsageStore(database)
    for tenant_id, run_id, count in [('alice', 'run-1', 3), ('alice', 'run-2', 1), ('bob', 'run-3', 5)]:
        points = [Point('x', step, 1.0) for step in range(count)]
        await metrics.save(tenant_id, run_id, points, moment=START, limits=PointLimits(per_run=9))
    await usage.record(batch(1, ('alice', 'run-2', Work(prompt_count=1))))
    assert list(await usage.list_of('alice', begin=None, end=None)) == [
        Usage(run_id='run-1', work=Work(), stored_bytes=0, metric_point_count=3),
        Usage(run_id='run-2', work=Work(prompt_count=1), stored_bytes=0, metric_point_count=1),
    ]
    metrics.close()


async def test_stored_bytes_exclude_deleted_checkpoints(database: Database) -> None:
    """Stored bytes are reported by run and in total, and exclude deleted checkpoints."""
    checkpoints, usage = SqlCheckpointStore(database), SqlUsageStore(database)
    for run, name, size in [('run-1', 'a', 1 << 40), ('run-1', 'b', 5), ('run-2', 'a', 7)]:
        await checkpoints.save(_checkpoint(run, name, size))
    await checkpoints.mark_absent_deleted({_key(_checkpoint(run, 'a', 0)) for run in ('run-1', 'run-2')}, moment=START)
    await usage.record(batch(1, ('alice', 'run-2', Work(prompt_count=1))))
    assert await usage.stored_bytes('alice') == (1 << 40) + 7
    assert await usage.stored_bytes('bob') == 0
    assert list(await usage.list_of('alice', begin=None, end=None)) == [
        Usage(run_id='run-1', work=Work(), stored_bytes=1 << 40),
        Usage(run_id='run-2', work=Work(prompt_count=1), stored_bytes=7),
    ]


def _key(checkpoint: Checkpoint) -> Any:
    return checkpoint.tenant_id, checkpoint.checkpoint_id


def _checkpoint(run_id: str, name: str, size_bytes: int) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=f'{run_id}/weights/{name}',
        tenant_id='alice',
        run_id=run_id,
        name=name,
        path=f'twinkle://{run_id}/weights/{name}',
        base_model='tiny',
        is_optimizer_included=False,
        size_bytes=size_bytes,
        step_count=0,
        digest='',
        folder='',
        create_time=START,
    )
