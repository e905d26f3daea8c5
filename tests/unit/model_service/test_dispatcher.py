"""The dispatcher runs batches of several adapters, and supports cancellation, positions and shutdown."""

import asyncio
from datetime import timedelta

import pytest

from fixtures.dispatching import Harness, adapter_of
from fixtures.model_verbs import evaluation, let_others_run, training
from twinkle_services.kit.errors import AdapterNotFound, Cancelled, Draining, Internal, InvalidField
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import VerbRun
from twinkle_services.model.domain.operation import Forward, Step, Verb
from twinkle_services.model.domain.scheduler import ReadyVerb, Scheduler


async def test_ready_batches_of_several_adapters_run_together() -> None:
    """Verbs that become ready while the engine is busy run together in one call per kind."""
    harness = Harness()
    adapters = await harness.adapters(7)
    harness.trainer.gate.clear()
    first = harness.start(adapters[0], training())
    await let_others_run()
    verbs = [training(), evaluation(), training(), evaluation(), training(), Forward(features=training().features)]
    remaining = [harness.start(adapter, verb) for adapter, verb in zip(adapters[1:], verbs, strict=True)]
    await let_others_run()
    harness.trainer.gate.set()
    runs = await asyncio.gather(first, *remaining)
    names = [adapter.adapter_id for adapter in adapters]
    assert harness.trainer.batches == [[names[0]], [names[1], names[3], names[5]], [names[2], names[4]], [names[6]]]
    assert [run.pass_adapter_count for run in runs] == [1, 3, 2, 3, 2, 3, 1]


async def test_a_quick_verb_runs_before_waiting_batches() -> None:
    """A quick verb runs directly after the running batch, before all waiting batches."""
    harness = Harness()
    adapters = await harness.adapters(20)
    (bob,) = await harness.adapters(1, tenant='bob')
    harness.trainer.gate.clear()
    runs = [harness.start(adapter, training(60)) for adapter in adapters]
    await let_others_run()
    runs.append(harness.start(bob, Step()))
    await let_others_run()
    harness.trainer.gate.set()
    await asyncio.gather(*runs)
    assert harness.trainer.batches[1] == [bob.adapter_id]


async def test_a_refused_verb_does_not_affect_its_batch() -> None:
    """A refused verb does not affect the outcomes of the other verbs in its batch."""
    harness = Harness()
    adapters = await harness.adapters(4)
    harness.trainer.gate.clear()
    runs = [harness.start(adapter, training()) for adapter in adapters]
    await let_others_run()
    await harness.trainer.delete_adapter(adapters[2].adapter_id)
    harness.trainer.gate.set()
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [VerbRun, VerbRun, AdapterNotFound, VerbRun]


async def test_full_parameters_never_share_a_pass() -> None:
    """A full-parameter adapter never shares a pass, because its weights differ from the shared base model."""
    harness = Harness()
    adapters = await harness.adapters(3)
    harness.trainer.gate.clear()
    full = adapter_of(adapters[1].adapter_id, 'alice', full_parameters=())
    runs = [harness.start(adapters[0], Step()), harness.start(full, training()), harness.start(adapters[2], training())]
    await let_others_run()
    harness.trainer.gate.set()
    await asyncio.gather(*runs)
    assert [len(batch) for batch in harness.trainer.batches] == [1, 1, 1]


async def test_a_defect_of_the_engine_fails_only_running_verbs() -> None:
    """A defect of the engine fails the running verbs; later verbs run normally."""
    harness = Harness()
    adapters = await harness.adapters(3)
    harness.trainer.gate.clear()
    harness.trainer.failures.append(RuntimeError('defect'))
    runs = [
        harness.start(adapter, verb) for adapter, verb in zip(adapters, [Step(), training(), training()], strict=True)
    ]
    await let_others_run()
    harness.trainer.gate.set()
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RuntimeError, VerbRun, VerbRun]


class _BrokenScheduler(Scheduler):
    """Scheduler that fails when its second batch is requested."""

    batch_count = 0

    def next_batch(self) -> list[ReadyVerb]:
        self.batch_count += 1
        if self.batch_count == 2:
            raise ZeroDivisionError
        return super().next_batch()


async def test_a_defect_of_the_dispatcher_fails_waiting_verbs() -> None:
    """A defect of the dispatcher fails all waiting verbs as INTERNAL; later verbs run."""
    harness = Harness(_BrokenScheduler(batch_tokens=64))
    adapters = await harness.adapters(5)
    runs = [harness.start(adapter, training(60)) for adapter in adapters]
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [VerbRun, *[Internal] * 4]
    assert isinstance(await harness.start(adapters[1], training()), VerbRun)


async def test_a_cancelled_verb_never_reaches_the_engine() -> None:
    """A cancelled waiting verb never runs, but the next verb of its adapter runs; a running pass completes."""
    harness = Harness()
    running, waiting = await harness.adapters(2)
    harness.trainer.gate.clear()
    runs = [harness.start(running, training()), harness.start(waiting, evaluation())]
    await let_others_run()
    assert harness.dispatcher.cancel(running.adapter_id)
    assert harness.dispatcher.cancel(waiting.adapter_id)
    assert not harness.dispatcher.cancel(waiting.adapter_id)
    with pytest.raises(Cancelled):
        await runs[1]
    next_verb = harness.start(waiting, Step())
    harness.trainer.gate.set()
    await asyncio.gather(runs[0], next_verb)
    assert [verb for _, verb in harness.trainer.ran if verb == evaluation()] == []


async def test_a_disconnected_caller_withdraws_its_waiting_verb() -> None:
    """If a caller disconnects, its verb is withdrawn while it waits, and completes if it already runs."""
    harness = Harness()
    running, waiting = await harness.adapters(2)
    harness.trainer.gate.clear()
    runs = [harness.start(running, training()), harness.start(waiting, evaluation())]
    await let_others_run()
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    harness.trainer.gate.set()
    await harness.start(waiting, Step())
    assert [adapter_id for adapter_id, _ in harness.trainer.ran] == [running.adapter_id, waiting.adapter_id]


async def test_positions_estimate_the_wait() -> None:
    """The estimated wait is based on measured durations, and includes the remaining time of the running batch."""
    harness = Harness()
    adapters = await harness.adapters(4)

    async def timed(seconds: float, verb: Verb) -> None:
        harness.trainer.gate.clear()
        run = harness.start(adapters[0], verb)
        await let_others_run()
        harness.clock.advance(timedelta(seconds=seconds))
        harness.trainer.gate.set()
        await run

    await timed(6.0, training(60))
    await timed(1.0, Step())
    harness.trainer.gate.clear()
    runs = [harness.start(adapter, training(40)) for adapter in adapters[:3]]
    runs.append(harness.start(adapters[3], evaluation(10)))
    await let_others_run()
    assert harness.dispatcher.position_of(adapters[0].adapter_id) is None
    positions = [harness.dispatcher.position_of(adapter.adapter_id) for adapter in adapters[1:]]
    assert [position.operation_count for position in positions if position] == [1, 2, 3]
    assert [position.estimated_wait.total_seconds() for position in positions if position] == pytest.approx(
        [4.0, 8.0, 12.0]
    )
    harness.clock.advance(timedelta(seconds=3))
    position = harness.dispatcher.position_of(adapters[1].adapter_id)
    assert position is not None
    assert position.estimated_wait.total_seconds() == pytest.approx(1.0)
    harness.trainer.gate.set()
    await asyncio.gather(*runs)


async def test_a_result_contains_its_waiting_time() -> None:
    """A result contains the time from being ready until the start."""
    harness = Harness()
    adapters = await harness.adapters(2)
    harness.trainer.gate.clear()
    runs = [harness.start(adapter, training(60)) for adapter in adapters]
    await let_others_run()
    harness.clock.advance(timedelta(seconds=5))
    harness.trainer.gate.set()
    assert [run.wait_seconds for run in await asyncio.gather(*runs)] == [0.0, 5.0]


async def test_close_refuses_waiting_verbs_and_finishes_running_ones() -> None:
    """Closing refuses waiting verbs and waits for the running ones."""
    harness = Harness()
    adapters = await harness.adapters(2)
    harness.trainer.gate.clear()
    runs = [harness.start(adapter, training(60)) for adapter in adapters]
    await let_others_run()
    closing = asyncio.ensure_future(harness.dispatcher.close())
    with pytest.raises(Draining):
        await runs[1]
    assert not closing.done()
    harness.trainer.gate.set()
    await closing
    assert isinstance(await runs[0], VerbRun)
    with pytest.raises(Draining):
        await harness.start(adapters[0], Step())


async def test_an_idle_dispatcher_has_no_task() -> None:
    """The dispatcher has no background task once all verbs have run."""
    harness = Harness()
    (adapter,) = await harness.adapters(1)
    for _ in range(3):
        await harness.start(adapter, Step())
    await let_others_run()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == 'dispatcher']


async def test_refusals_of_single_runs_reach_the_caller() -> None:
    """A refusal raised by `run` reaches the caller unchanged."""
    harness = Harness()
    (adapter,) = await harness.adapters(1)
    harness.trainer.failures.append(InvalidField('features', 'are bad'))
    with pytest.raises(InvalidField):
        await harness.start(adapter, training())


async def _run_timed(harness: Harness, adapters: list[Adapter], *, seconds: float, pause_seconds: float) -> None:
    """Run a batch of all adapters that takes `seconds`, after a pause."""
    harness.clock.advance(timedelta(seconds=pause_seconds))
    harness.trainer.gate.clear()
    runs = [harness.start(adapter, training(10)) for adapter in adapters]
    await let_others_run()
    harness.clock.advance(timedelta(seconds=seconds))
    harness.trainer.gate.set()
    await asyncio.gather(*runs)


async def test_adapters_with_short_think_times_share_the_next_pass() -> None:
    """A pass waits for adapters whose next verb usually arrives quickly, and runs their verbs together."""
    harness = Harness()
    adapters = await harness.adapters(3)
    for _ in range(2):
        await _run_timed(harness, adapters, seconds=1000.0, pause_seconds=1.0)
    first = harness.start(adapters[0], training(10))
    await let_others_run()
    assert not first.done()
    remaining = [harness.start(adapter, training(10)) for adapter in adapters[1:]]
    await asyncio.gather(first, *remaining)
    assert harness.trainer.batches[-1] == [adapter.adapter_id for adapter in adapters]


async def test_a_withdrawn_verb_ends_the_wait_for_others() -> None:
    """Withdrawing an expected verb ends the wait for this verb; a verb that arrives at that moment runs."""
    harness = Harness()
    adapters = await harness.adapters(3)
    for _ in range(2):
        await _run_timed(harness, adapters, seconds=1000.0, pause_seconds=1.0)
    first = harness.start(adapters[0], training(10))
    await let_others_run()
    assert harness.dispatcher.cancel(adapters[0].adapter_id)
    second = harness.start(adapters[1], training(64))
    (outcome, run) = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(outcome, Cancelled)
    assert isinstance(run, VerbRun)
    third = harness.start(adapters[0], training(10))
    await let_others_run()
    assert harness.dispatcher.cancel(adapters[0].adapter_id)
    await let_others_run()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == 'dispatcher']
    with pytest.raises(Cancelled):
        await third
    assert isinstance(await harness.start(adapters[0], Step()), VerbRun)


async def test_quick_verbs_do_not_wait_and_full_batches_wait_less() -> None:
    """A quick verb waits for no other verb; a full batch waits only for verbs that are expected very soon."""
    harness = Harness()
    adapters = await harness.adapters(3)
    for _ in range(2):
        await _run_timed(harness, adapters, seconds=1000.0, pause_seconds=200.0)
    await harness.start(adapters[0], Step())
    await harness.start(adapters[1], training(64))


async def test_a_step_runs_before_the_next_full_batch() -> None:
    """A full batch waits for an adapter whose step usually follows its verb immediately."""
    harness = Harness()
    stepping, *others = await harness.adapters(3)
    for _ in range(2):
        await _run_timed(harness, [stepping], seconds=1000.0, pause_seconds=1.0)
        await harness.start(stepping, Step())
    harness.trainer.gate.clear()
    runs = [harness.start(adapter, training(64)) for adapter in (stepping, *others)]
    await let_others_run()
    harness.trainer.gate.set()
    await runs[0]
    await harness.start(stepping, Step())
    await asyncio.gather(*runs)
    assert [batch[0] for batch in harness.trainer.batches[-4:]] == [
        adapter.adapter_id for adapter in (stepping, stepping, *others)
    ]


async def test_the_wait_for_absent_adapters_is_short() -> None:
    """The wait is a small share of the batch's duration. Adapters with a longer think time are not waited for."""
    harness = Harness()
    adapters = await harness.adapters(3)
    for _ in range(2):
        await _run_timed(harness, adapters, seconds=0.05, pause_seconds=0.002)
    await harness.start(adapters[0], training(10))
    assert harness.trainer.batches[-1] == [adapters[0].adapter_id]
    slow = Harness()
    adapters = await slow.adapters(3)
    for _ in range(2):
        await _run_timed(slow, adapters, seconds=1000.0, pause_seconds=500.0)
    await slow.start(adapters[0], training(10))
    assert slow.trainer.batches[-1] == [adapters[0].adapter_id]


async def test_durations_of_passes_limit_the_next_one() -> None:
    """Durations of earlier passes limit the size of two tenants' later passes; verbs that do not fit run later."""
    harness = Harness(Scheduler(batch_tokens=1024), batch_seconds=2.0)
    adapters = [*await harness.adapters(20), *await harness.adapters(20, tenant='bob')]
    await _run_timed(harness, adapters, seconds=5.0, pause_seconds=0.0)
    await _run_timed(harness, adapters, seconds=5.0, pause_seconds=0.0)
    sizes = [len(batch) for batch in harness.trainer.batches]
    assert sizes[0] == 40
    assert sizes[1] == 16
    assert sum(sizes) == 80
