"""One stream of a model service fills the catalogue and the meters, and what comes twice counts once."""

from datetime import UTC, datetime

import pytest

from fixtures.gateway_stores import MemoryRunStore
from fixtures.usage_stores import MemoryQuotaStore, MemoryUsageStore
from services.gateway.application.quotas import MeteredRuns, QuotaBook, TokenRates, UsageMeter
from services.gateway.domain.catalogue import Run
from services.gateway.domain.quota import Quota
from services.gateway.domain.usage import MeteredRun, Reading
from services.kit.clock import FakeClock
from services.kit.errors import ServiceUnreachable

START = datetime(2026, 5, 1, tzinfo=UTC)
KEY = ('alice', 'run-1')


class AwayRunStore(MemoryRunStore):
    """A store of runs that cannot be reached for a while."""

    is_away = False

    async def save(self, entry: Run) -> None:
        """Keep the run, unless it is away."""
        if self.is_away:
            raise ServiceUnreachable('database')
        await super().save(entry)


class World:
    """Both copies, and what fills them."""

    def __init__(self) -> None:
        """Know nothing yet."""
        clock = FakeClock()
        self.rates = TokenRates(QuotaBook(MemoryQuotaStore(), default=Quota(tokens_per_second=1)), clock=clock)
        self.usage, self.runs = MemoryUsageStore(), AwayRunStore()
        self.meter = UsageMeter(self.usage, self.rates, clock=clock)
        self.shelf = MeteredRuns(runs=self.runs, meters=self.meter)

    async def trained(self) -> int:
        """Return how many tokens are written down."""
        await self.meter.flush()
        return sum(item.work.trained_token_count for item in await self.usage.list_of('alice', begin=None, end=None))


def metered(tokens: int) -> MeteredRun:
    """Return a run that was trained on so many tokens."""
    run = Run(
        run_id='run-1',
        tenant_id='alice',
        base_model='tiny',
        lora_rank=8,
        step_count=0,
        version=0,
        is_active=True,
        create_time=START,
        update_time=START,
    )
    reading = Reading(run_id='run-1', tenant_id='alice', trained_token_count=tokens, operation_count=1)
    return MeteredRun(run=run, reading=reading)


async def test_a_run_and_its_meter_are_kept_together() -> None:
    """It is in the catalogue and counted; when it is gone, the catalogue says so and what it used stays."""
    world = World()
    await world.shelf.save(metered(10))
    await world.shelf.mark_gone(KEY, moment=START)
    found = await world.runs.get(*KEY)
    assert found is not None
    assert (found.is_active, await world.trained()) == (False, 10)


async def test_what_a_snapshot_does_not_tell_of_is_gone() -> None:
    """The catalogue's copy is made from snapshots; of meters each service tells its own alone."""
    world = World()
    await world.shelf.save(metered(10))
    await world.shelf.mark_absent_gone(set(), moment=START)
    found = await world.runs.get(*KEY)
    assert found is not None
    assert (found.is_active, await world.trained()) == (False, 10)


async def test_what_comes_again_after_the_catalogue_was_away_is_charged_once() -> None:
    """Tokens are charged though the run cannot be kept, and not again when the stream goes on from before it."""
    world = World()
    await world.shelf.save(metered(10))
    world.runs.is_away = True
    with pytest.raises(ServiceUnreachable):
        await world.shelf.save(metered(40))
    owed = world.rates.seconds_until_free('alice')
    assert owed == pytest.approx(20.0)
    world.runs.is_away = False
    await world.shelf.save(metered(40))
    assert (world.rates.seconds_until_free('alice'), await world.trained()) == (owed, 40)
