"""The usage meter writes each measurement to the store once, even after failures."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from twinkle_services.gateway.fleet.sampler_choice import AdapterRequest, RouteKey
from twinkle_services.gateway.futures.executors import SampleTally
from twinkle_services.gateway.futures.rules import Future, FutureRequest
from twinkle_services.gateway.quotas.enforcement import QuotaTable, TokenRates
from twinkle_services.gateway.quotas.rules import Quota, Reading, UsageBatch, Work
from twinkle_services.gateway.quotas.sql import SqlQuotaStore, SqlUsageStore
from twinkle_services.gateway.quotas.usage_meter import MAX_READINGS, UsageMeter
from twinkle_services.gateway.sampling.rules import BatchRequest, PromptResult
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import Cancelled, DomainError, ServiceUnreachable

RESULT = PromptResult(0, b'', prompt_token_count=7, sampled_token_count=5)
WORK = Work(prompt_token_count=7, sampled_token_count=5, prompt_count=1)


class FailingStore(SqlUsageStore):
    """A store that raises `failures` before it records a batch, and `late_failures` afterwards."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.failures: list[DomainError] = []
        self.late_failures: list[DomainError] = []
        self.batch_count = 0

    async def record(self, batch: UsageBatch) -> None:
        if self.failures:
            raise self.failures.pop(0)
        await super().record(batch)
        self.batch_count += 1
        if self.late_failures:
            raise self.late_failures.pop(0)


class Harness:
    """A meter with the given default quota."""

    def __init__(self, database: Database, **default: Any) -> None:
        self.clock, self.store = FakeClock(), FailingStore(database)
        self.rates = TokenRates(QuotaTable(SqlQuotaStore(database), default=Quota(**default)), clock=self.clock)
        self.meter = UsageMeter(self.store, self.rates, clock=self.clock, pause=lambda _: asyncio.sleep(0))
        self.tally = SampleTally(self.meter)

    async def used(self, tenant_id: str = 'alice') -> dict[str, Work]:
        """Return the stored usage by run."""
        found = await self.store.list_of(tenant_id, begin=None, end=None)
        return {item.run_id: item.work for item in found}


def reading(tokens: int, run_id: str = 'run-1', operations: int = 1) -> Reading:
    """Return a reading of a run's meter."""
    return Reading(run_id=run_id, tenant_id='alice', trained_token_count=tokens, operation_count=operations)


async def test_counts_are_written_in_one_batch(database: Database) -> None:
    """One batch contains the sums by tenant and run; a flush without new counts writes nothing."""
    harness = Harness(database)
    for _ in range(3):
        harness.meter.count('alice', 'run-1', WORK)
    harness.meter.count('alice', '', Work(prompt_count=1))
    await harness.meter.save(reading(10))
    await harness.meter.flush()
    await harness.meter.flush()
    assert harness.store.batch_count == 1
    assert await harness.used() == {
        '': Work(prompt_count=1),
        'run-1': WORK + WORK + WORK + Work(trained_token_count=10, operation_count=1),
    }


@pytest.mark.parametrize('failure_list', ['failures', 'late_failures'])
async def test_database_failure_neither_loses_nor_doubles_counts(database: Database, failure_list: str) -> None:
    """If the store fails before or after a write, all counts, including those during the outage, are written once."""
    harness = Harness(database)
    setattr(harness.store, failure_list, [ServiceUnreachable('database')] * 2)
    harness.meter.count('alice', 'run-1', WORK)
    await harness.meter.save(reading(10))
    for _ in range(2):
        with pytest.raises(ServiceUnreachable):
            await harness.meter.flush()
        harness.meter.count('alice', 'run-1', WORK)
        await harness.meter.save(reading(20))
    await harness.meter.close()
    assert await harness.used() == {
        'run-1': WORK + WORK + WORK + Work(trained_token_count=20, operation_count=1),
    }


async def test_many_runs_are_written_in_several_batches(database: Database) -> None:
    """Readings of many runs are split into batches of limited size, and all readings are stored."""
    harness, count = Harness(database), MAX_READINGS + 1
    for number in range(count):
        await harness.meter.save(reading(number + 1, f'run-{number}'))
    await harness.meter.flush()
    assert harness.store.batch_count == 2
    assert len(await harness.used()) == count


async def test_trained_tokens_are_charged_once(database: Database) -> None:
    """Tokens from before the gateway's first reading are not charged, and a repeated value charges nothing."""
    harness = Harness(database, tokens_per_second=10, burst_tokens=1)
    for tokens in (1000, 1000, 1041, 1041):
        await harness.meter.save(reading(tokens))
    assert harness.rates.seconds_until_free('alice') == pytest.approx(4.0)
    harness.clock.advance(timedelta(seconds=4))
    harness.meter.count('alice', '', Work(sampled_token_count=10, prompt_token_count=10))
    assert harness.rates.seconds_until_free('alice') == pytest.approx(2.0)


def future_of(key: str) -> Future:
    """Return an accepted sampling future."""
    request = FutureRequest(kind='sample', key=key, payload=b'', session_id='')
    return Future.accepted(request, tenant_id='alice', moment=FakeClock().now())


def batch_for(adapter: AdapterRequest | None) -> BatchRequest:
    """Return a batch of one prompt for the given weights."""
    return BatchRequest(message=b'', keys=(RouteKey(base_model='tiny', adapter=adapter),))


async def test_sample_is_counted_once_when_it_is_settled(database: Database) -> None:
    """Repeated attempts count once; samples that failed, or that another gateway settled, do not count."""
    harness, moment = Harness(database), FakeClock().now()
    request = batch_for(AdapterRequest(adapter_id='run-1'))
    done, failed, taken = future_of('done'), future_of('failed'), future_of('taken')
    for future in (done, done, failed, taken):
        harness.tally.note(future, request, RESULT)
    settled = done.done(moment=moment)
    # The reply to the first attempt to store the result was lost; the stored result has that attempt's time.
    harness.tally.settled(done.done(moment=moment + timedelta(seconds=1)), settled)
    harness.tally.settled(settled, settled)
    lost = failed.failed(Cancelled(), moment=moment)
    harness.tally.settled(lost, lost)
    harness.tally.settled(taken.done(moment=moment), replace(taken.done(moment=moment), owner='another'))
    unknown = future_of('unknown').done(moment=moment)
    harness.tally.settled(unknown, unknown)
    await harness.meter.flush()
    assert await harness.used() == {'run-1': WORK}


@pytest.mark.parametrize(
    ('adapter', 'run_id'),
    [
        (None, ''),
        (AdapterRequest(adapter_id='ses:train:0', exact=3), 'ses:train:0'),
        (AdapterRequest(adapter_id='twinkle://ses:train:0/weights/best', is_checkpoint=True), 'ses:train:0'),
    ],
)
def test_samples_belong_to_the_run_of_their_weights(adapter: AdapterRequest | None, run_id: str) -> None:
    """A sample of a checkpoint counts for the checkpoint's run; a sample of the base model counts for no run."""
    assert batch_for(adapter).keys[0].run_id == run_id
