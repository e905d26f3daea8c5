"""The meter: what is counted is written down once, whatever fails."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fixtures.usage_stores import MemoryQuotaStore, MemoryUsageStore
from services.gateway.fleet.routing import AdapterRequest, RouteKey
from services.gateway.futures.limits import SampleTally
from services.gateway.futures.rules import Future, FutureRequest
from services.gateway.quotas.limits import QuotaTable, TokenRates
from services.gateway.quotas.meter import MOST_READINGS, UsageMeter
from services.gateway.quotas.rules import Quota, Reading, Work
from services.gateway.sampling.rules import BatchRequest, PromptResult
from services.kit.clock import FakeClock
from services.kit.errors import Cancelled, ServiceUnreachable

ANSWER = PromptResult(0, b'', prompt_token_count=7, sampled_token_count=5)
WORK = Work(prompt_token_count=7, sampled_token_count=5, prompt_count=1)


class World:
    """A meter over a store in memory."""

    def __init__(self, **default: Any) -> None:
        """Charge by this quota."""
        self.clock, self.store = FakeClock(), MemoryUsageStore()
        self.rates = TokenRates(QuotaTable(MemoryQuotaStore(), default=Quota(**default)), clock=self.clock)
        self.meter = UsageMeter(self.store, self.rates, clock=self.clock, pause=lambda _: asyncio.sleep(0))
        self.tally = SampleTally(self.meter)

    async def used(self, tenant_id: str = 'alice') -> dict[str, Work]:
        """Return what is written down, by run."""
        found = await self.store.list_of(tenant_id, begin=None, end=None)
        return {item.run_id: item.work for item in found}


def reading(tokens: int, run_id: str = 'run-1', operations: int = 1) -> Reading:
    """Return a run's meter."""
    return Reading(run_id=run_id, tenant_id='alice', trained_token_count=tokens, operation_count=operations)


async def test_what_is_counted_is_written_down_together() -> None:
    """Added up by tenant and run; and nothing is written where nothing was counted."""
    world = World()
    for _ in range(3):
        world.meter.count('alice', 'run-1', WORK)
    world.meter.count('alice', '', Work(prompt_count=1))
    await world.meter.save(reading(10))
    await world.meter.flush()
    await world.meter.flush()
    assert world.store.batch_count == 1
    assert await world.used() == {
        '': Work(prompt_count=1),
        'run-1': WORK + WORK + WORK + Work(trained_token_count=10, operation_count=1),
    }


@pytest.mark.parametrize('where', ['failures', 'late_failures'])
async def test_nothing_is_lost_or_doubled_while_the_database_is_away(where: str) -> None:
    """Whether it failed before it wrote or after; what is counted meanwhile follows."""
    world = World()
    setattr(world.store, where, [ServiceUnreachable('database')] * 2)
    world.meter.count('alice', 'run-1', WORK)
    await world.meter.save(reading(10))
    for _ in range(2):
        with pytest.raises(ServiceUnreachable):
            await world.meter.flush()
        world.meter.count('alice', 'run-1', WORK)
        await world.meter.save(reading(20))
    await world.meter.close()
    assert await world.used() == {
        'run-1': WORK + WORK + WORK + Work(trained_token_count=20, operation_count=1),
    }


async def test_many_runs_are_written_down_in_parts() -> None:
    """A snapshot of thousands makes no endless transaction, and is whole in the end."""
    world, count = World(), 2 * MOST_READINGS + 1
    for number in range(count):
        await world.meter.save(reading(number + 1, f'run-{number}'))
    await world.meter.flush()
    assert world.store.batch_count == 3
    assert len(await world.used()) == count


async def test_trained_tokens_are_charged_as_meters_go_on() -> None:
    """What was trained before this gateway began is not; a meter that is read again and again is charged once."""
    world = World(tokens_per_second=10, burst_tokens=1)
    for tokens in (1000, 1000, 1041, 1041):
        await world.meter.save(reading(tokens))
    assert world.rates.seconds_until_free('alice') == pytest.approx(4.0)
    world.clock.advance(timedelta(seconds=4))
    world.meter.count('alice', '', Work(sampled_token_count=10, prompt_token_count=10))
    assert world.rates.seconds_until_free('alice') == pytest.approx(2.0)


def future_of(key: str) -> Future:
    """Return a sample."""
    order = FutureRequest(kind='sample', key=key, payload=b'', session_id='')
    return Future.accepted(order, tenant_id='alice', moment=FakeClock().now())


def order_for(wish: AdapterRequest | None) -> BatchRequest:
    """Return what it asked for."""
    return BatchRequest(message=b'', keys=(RouteKey(base_model='tiny', adapter=wish),))


async def test_a_sample_counts_once_when_it_is_settled() -> None:
    """However often it ran; not one that failed, nor one that another gateway settled."""
    world, moment = World(), FakeClock().now()
    order = order_for(AdapterRequest(adapter_id='run-1'))
    done, failed, others = future_of('done'), future_of('failed'), future_of('others')
    for future in (done, done, failed, others):
        world.tally.note(future, order, ANSWER)
    settled = done.done(moment=moment)
    # The answer of the first attempt to keep it was lost: what is kept has that attempt's moment.
    world.tally.settled(done.done(moment=moment + timedelta(seconds=1)), settled)
    world.tally.settled(settled, settled)
    lost = failed.failed(Cancelled(), moment=moment)
    world.tally.settled(lost, lost)
    world.tally.settled(others.done(moment=moment), replace(others.done(moment=moment), owner='another'))
    unknown = future_of('unknown').done(moment=moment)
    world.tally.settled(unknown, unknown)
    await world.meter.flush()
    assert await world.used() == {'run-1': WORK}


@pytest.mark.parametrize(
    ('wish', 'run_id'),
    [
        (None, ''),
        (AdapterRequest(adapter_id='ses:train:0', exact=3), 'ses:train:0'),
        (AdapterRequest(adapter_id='twinkle://ses:train:0/weights/best', is_checkpoint=True), 'ses:train:0'),
    ],
)
def test_samples_belong_to_the_run_of_their_weights(wish: AdapterRequest | None, run_id: str) -> None:
    """Also those of a checkpoint; the base model alone is nobody's run."""
    assert order_for(wish).keys[0].run_id == run_id
