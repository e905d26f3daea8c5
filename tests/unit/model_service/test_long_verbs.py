"""The dispatcher runs a long verb pass by pass, and runs other verbs between the passes."""

import asyncio
from datetime import timedelta

import pytest

from fixtures.dispatching import Harness
from fixtures.model_verbs import let_others_run, training
from twinkle_services.kit.errors import Cancelled, Draining, Internal
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import VerbRun
from twinkle_services.model.domain.operation import Step
from twinkle_services.model.domain.scheduler import Scheduler


class LongVerb:
    """A verb of 200 tokens that waits in its first pass of 64 tokens, and two other adapters."""

    def __init__(self, harness: Harness, adapters: list[Adapter]) -> None:
        self.harness = harness
        self.adapter, *self.others = adapters
        self.run: asyncio.Future[VerbRun] = harness.start(self.adapter, training(200))

    @classmethod
    async def begin(cls, harness: Harness) -> 'LongVerb':
        """Begin the verb."""
        harness.trainer.pass_tokens = 64
        adapters = [*await harness.adapters(2), *await harness.adapters(1, tenant='bob')]
        harness.trainer.gate.clear()
        long_verb = cls(harness, adapters)
        await let_others_run()
        return long_verb

    async def end_pass(self) -> None:
        """Let the first pass end, and hold the next verb before it runs."""
        self.harness.trainer.gate.set()
        await asyncio.sleep(0)
        self.harness.trainer.gate.clear()
        await let_others_run()
        assert self.harness.trainer.unfinished

    def turns(self) -> list[str]:
        """Return the adapters of all passes and quick verbs so far, as letters."""
        names = {self.adapter.adapter_id: 'L', self.others[0].adapter_id: 'a', self.others[1].adapter_id: 'b'}
        return [''.join(names[adapter_id] for adapter_id in batch) for batch in self.harness.trainer.batches]


async def test_other_verbs_run_between_the_passes_of_a_long_verb() -> None:
    """The same tenant's and another tenant's verbs run between the passes of a long verb; its result is complete."""
    long_verb = await LongVerb.begin(Harness())
    harness, (same_tenant, other_tenant) = long_verb.harness, long_verb.others
    runs = [harness.start(same_tenant, training(60)), harness.start(other_tenant, Step())]
    await let_others_run()
    harness.trainer.gate.set()
    outcomes = await asyncio.gather(long_verb.run, *runs)
    assert long_verb.turns() == ['L', 'b', 'a', 'L', 'L', 'L']
    alone = await harness.trainer.run(same_tenant.adapter_id, training(200))
    assert outcomes[0].pass_count == alone.pass_count == 4
    assert not harness.trainer.unfinished


@pytest.mark.parametrize('moment', ['during a pass', 'between passes'])
async def test_a_long_verb_is_cancelled_between_its_passes(moment: str) -> None:
    """A verb that is cancelled during a pass or between passes changes nothing, and its adapter's next verb runs."""
    long_verb = await LongVerb.begin(Harness())
    harness = long_verb.harness
    before = await harness.trainer.snapshot(long_verb.adapter.adapter_id)
    quick = harness.start(long_verb.others[1], Step())
    if moment == 'between passes':
        await long_verb.end_pass()
    assert harness.dispatcher.cancel(long_verb.adapter.adapter_id)
    harness.trainer.gate.set()
    with pytest.raises(Cancelled):
        await long_verb.run
    await quick
    assert long_verb.turns() == ['L', 'b']
    assert not harness.trainer.unfinished
    assert await harness.trainer.snapshot(long_verb.adapter.adapter_id) == before
    assert isinstance(await harness.start(long_verb.adapter, training(8)), VerbRun)


async def test_a_verb_that_cannot_be_abandoned_fails_alone() -> None:
    """If the engine cannot abandon a cancelled verb, the pass's other verbs complete and later verbs run."""
    harness = Harness(Scheduler(batch_tokens=128))
    harness.trainer.pass_tokens = 30
    long, short = await harness.adapters(2)
    harness.trainer.gate.clear()
    runs = [harness.start(long, training(90)), harness.start(short, training(20))]
    await let_others_run()
    harness.trainer.abandon_failure = Internal('')
    assert harness.dispatcher.cancel(long.adapter_id)
    harness.trainer.gate.set()
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Internal, VerbRun]
    assert harness.trainer.batches == [[long.adapter_id, short.adapter_id]]
    assert isinstance(await harness.start(short, Step()), VerbRun)


async def test_close_does_not_wait_for_all_passes_of_a_long_verb() -> None:
    """Closing waits for the running pass only, and refuses the verb, which changes nothing."""
    long_verb = await LongVerb.begin(Harness())
    closing = asyncio.ensure_future(long_verb.harness.dispatcher.close())
    await let_others_run()
    long_verb.harness.trainer.gate.set()
    await closing
    with pytest.raises(Draining):
        await long_verb.run
    assert long_verb.turns() == ['L']
    assert not long_verb.harness.trainer.unfinished


async def test_a_long_verb_has_a_position_until_it_begins() -> None:
    """A verb between two of its passes has no queue position; other verbs wait for only one of its passes."""
    harness = Harness()
    long_verb = await LongVerb.begin(harness)
    waiting = harness.start(long_verb.others[1], training(60))
    await let_others_run()
    harness.clock.advance(timedelta(seconds=64))
    position = harness.dispatcher.position_of(long_verb.others[1].adapter_id)
    assert position is not None
    assert position.operation_count == 1
    await long_verb.end_pass()
    assert harness.dispatcher.position_of(long_verb.adapter.adapter_id) is None
    harness.trainer.gate.set()
    await asyncio.gather(long_verb.run, waiting)
    assert long_verb.turns() == ['L', 'b', 'L', 'L', 'L']
