"""The dispatcher runs batches across adapters; what waits can be cancelled, placed, refused, and never hangs."""

import asyncio
from datetime import timedelta

import pytest

from fixtures.fake_trainer import FakeTrainer
from fixtures.model_verbs import evaluation, let_others_run, training
from services.kit.clock import FakeClock
from services.kit.errors import AdapterNotFound, Cancelled, Draining, Internal, InvalidField
from services.model.application.dispatcher import Dispatcher
from services.model.domain.adapter import Adapter
from services.model.domain.engine import VerbRun
from services.model.domain.operation import Forward, Operation, Step, Verb
from services.model.domain.scheduler import ReadyVerb, Scheduler
from services.model.domain.training_config import TrainingConfig
from twinkle.data_format import LoraConfig


class Ports:
    """A dispatcher over the fake trainer, and adapters."""

    def __init__(self, scheduler: Scheduler | None = None, *, batch_seconds: float | None = None) -> None:
        self.trainer = FakeTrainer()
        self.clock = FakeClock()
        own = Scheduler(batch_tokens=64) if scheduler is None else scheduler
        self.dispatcher = Dispatcher(self.trainer, own, self.clock, batch_seconds=batch_seconds)

    async def adapters(self, count: int, *, tenant: str = 'alice') -> list[Adapter]:
        """Make adapters of a tenant."""
        made = [_adapter(f'{tenant}-{index}', tenant) for index in range(count)]
        for adapter in made:
            await self.trainer.create_adapter(adapter.adapter_id, adapter.lora_config, adapter.training_config)
        return made

    def start(self, adapter: Adapter, verb: Verb) -> 'asyncio.Future[VerbRun]':
        """Begin to run a verb."""
        operation = Operation(adapter_id=adapter.adapter_id, sequence_number=1, verb=verb, fingerprint='f')
        return asyncio.ensure_future(self.dispatcher.run(adapter, operation))


def _adapter(adapter_id: str, tenant: str, **changes: object) -> Adapter:
    now = FakeClock().now()
    values: dict[str, object] = {
        'adapter_id': adapter_id,
        'tenant_id': tenant,
        'base_model': 'tiny',
        'lora_config': LoraConfig(),
        'training_config': TrainingConfig(),
        'parameter_count': 4,
        'create_time': now,
        'update_time': now,
        **changes,
    }
    return Adapter(**values)  # type: ignore[arg-type]


async def test_ready_batches_of_several_adapters_run_together() -> None:
    """What gathers while the engine is busy goes to it in one call, each kind on its own."""
    ports = Ports()
    adapters = await ports.adapters(7)
    ports.trainer.gate.clear()
    first = ports.start(adapters[0], training())
    await let_others_run()
    verbs = [training(), evaluation(), training(), evaluation(), training(), Forward(features=training().features)]
    rest = [ports.start(adapter, verb) for adapter, verb in zip(adapters[1:], verbs, strict=True)]
    await let_others_run()
    ports.trainer.gate.set()
    runs = await asyncio.gather(first, *rest)
    names = [adapter.adapter_id for adapter in adapters]
    assert ports.trainer.batches == [[names[0]], [names[1], names[3], names[5]], [names[2], names[4]], [names[6]]]
    assert [run.pass_adapter_count for run in runs] == [1, 3, 2, 3, 2, 3, 1]


async def test_a_step_does_not_wait_behind_batches() -> None:
    """A quick verb runs right after what runs now, however many batches wait."""
    ports = Ports()
    adapters = await ports.adapters(20)
    (bob,) = await ports.adapters(1, tenant='bob')
    ports.trainer.gate.clear()
    runs = [ports.start(adapter, training(60)) for adapter in adapters]
    await let_others_run()
    runs.append(ports.start(bob, Step()))
    await let_others_run()
    ports.trainer.gate.set()
    await asyncio.gather(*runs)
    assert ports.trainer.batches[1] == [bob.adapter_id]


async def test_one_that_is_refused_leaves_its_neighbours() -> None:
    """In one batch each gets its own outcome."""
    ports = Ports()
    adapters = await ports.adapters(4)
    ports.trainer.gate.clear()
    runs = [ports.start(adapter, training()) for adapter in adapters]
    await let_others_run()
    await ports.trainer.delete_adapter(adapters[2].adapter_id)
    ports.trainer.gate.set()
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [VerbRun, VerbRun, AdapterNotFound, VerbRun]


async def test_full_parameters_never_share_a_pass() -> None:
    """They run on weights of their own."""
    ports = Ports()
    adapters = await ports.adapters(3)
    ports.trainer.gate.clear()
    full = _adapter(adapters[1].adapter_id, 'alice', full_parameters=())
    runs = [ports.start(adapters[0], Step()), ports.start(full, training()), ports.start(adapters[2], training())]
    await let_others_run()
    ports.trainer.gate.set()
    await asyncio.gather(*runs)
    assert [len(batch) for batch in ports.trainer.batches] == [1, 1, 1]


async def test_a_defect_of_the_engine_fails_what_ran_and_nothing_else() -> None:
    """What comes after it runs."""
    ports = Ports()
    adapters = await ports.adapters(3)
    ports.trainer.gate.clear()
    ports.trainer.failures.append(RuntimeError('defect'))
    runs = [
        ports.start(adapter, verb) for adapter, verb in zip(adapters, [Step(), training(), training()], strict=True)
    ]
    await let_others_run()
    ports.trainer.gate.set()
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RuntimeError, VerbRun, VerbRun]


class _BrokenScheduler(Scheduler):
    """Fails in the moment it is asked for the second batch."""

    asked = 0

    def next_batch(self) -> list[ReadyVerb]:
        self.asked += 1
        if self.asked == 2:
            raise ZeroDivisionError
        return super().next_batch()


async def test_a_defect_of_ours_hangs_nobody() -> None:
    """Everything that waits ends as INTERNAL, and what comes later runs."""
    ports = Ports(_BrokenScheduler(batch_tokens=64))
    adapters = await ports.adapters(5)
    runs = [ports.start(adapter, training(60)) for adapter in adapters]
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [VerbRun, *[Internal] * 4]
    assert isinstance(await ports.start(adapters[1], training()), VerbRun)


async def test_cancel_takes_what_waits_and_not_what_runs() -> None:
    """A cancelled operation never reaches the engine; the adapter's next one does."""
    ports = Ports()
    running, waiting = await ports.adapters(2)
    ports.trainer.gate.clear()
    runs = [ports.start(running, training()), ports.start(waiting, evaluation())]
    await let_others_run()
    assert not ports.dispatcher.cancel(running.adapter_id)
    assert ports.dispatcher.cancel(waiting.adapter_id)
    assert not ports.dispatcher.cancel(waiting.adapter_id)
    with pytest.raises(Cancelled):
        await runs[1]
    again = ports.start(waiting, Step())
    ports.trainer.gate.set()
    await asyncio.gather(runs[0], again)
    assert [verb for _, verb in ports.trainer.ran if verb == evaluation()] == []


async def test_a_caller_that_leaves_takes_back_what_waits() -> None:
    """And leaves what runs to its end."""
    ports = Ports()
    running, waiting = await ports.adapters(2)
    ports.trainer.gate.clear()
    runs = [ports.start(running, training()), ports.start(waiting, evaluation())]
    await let_others_run()
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    ports.trainer.gate.set()
    await ports.start(waiting, Step())
    assert [adapter_id for adapter_id, _ in ports.trainer.ran] == [running.adapter_id, waiting.adapter_id]


async def test_places_tell_what_is_before_and_for_how_long() -> None:
    """Known times of earlier batches give the estimate; what runs counts with what is left of it."""
    ports = Ports()
    adapters = await ports.adapters(4)

    async def timed(seconds: float, verb: Verb) -> None:
        ports.trainer.gate.clear()
        run = ports.start(adapters[0], verb)
        await let_others_run()
        ports.clock.advance(timedelta(seconds=seconds))
        ports.trainer.gate.set()
        await run

    await timed(6.0, training(60))
    await timed(1.0, Step())
    ports.trainer.gate.clear()
    runs = [ports.start(adapter, training(40)) for adapter in adapters[:3]]
    runs.append(ports.start(adapters[3], evaluation(10)))
    await let_others_run()
    assert ports.dispatcher.position_of(adapters[0].adapter_id) is None
    places = [ports.dispatcher.position_of(adapter.adapter_id) for adapter in adapters[1:]]
    assert [place.operation_count for place in places if place] == [1, 2, 3]
    assert [place.estimated_wait.total_seconds() for place in places if place] == pytest.approx([4.0, 8.0, 12.0])
    ports.clock.advance(timedelta(seconds=3))
    place = ports.dispatcher.position_of(adapters[1].adapter_id)
    assert place is not None
    assert place.estimated_wait.total_seconds() == pytest.approx(1.0)
    ports.trainer.gate.set()
    await asyncio.gather(*runs)


async def test_what_ran_tells_how_long_it_waited() -> None:
    """From when it was ready to when it began."""
    ports = Ports()
    adapters = await ports.adapters(2)
    ports.trainer.gate.clear()
    runs = [ports.start(adapter, training(60)) for adapter in adapters]
    await let_others_run()
    ports.clock.advance(timedelta(seconds=5))
    ports.trainer.gate.set()
    assert [run.wait_seconds for run in await asyncio.gather(*runs)] == [0.0, 5.0]


async def test_close_refuses_what_waits_and_waits_for_what_runs() -> None:
    """The end of the service interrupts nothing and leaves nobody waiting."""
    ports = Ports()
    adapters = await ports.adapters(2)
    ports.trainer.gate.clear()
    runs = [ports.start(adapter, training(60)) for adapter in adapters]
    await let_others_run()
    closing = asyncio.ensure_future(ports.dispatcher.close())
    with pytest.raises(Draining):
        await runs[1]
    assert not closing.done()
    ports.trainer.gate.set()
    await closing
    assert isinstance(await runs[0], VerbRun)
    with pytest.raises(Draining):
        await ports.start(adapters[0], Step())


async def test_an_idle_dispatcher_has_no_task() -> None:
    """Nothing is left behind once everything ran."""
    ports = Ports()
    (adapter,) = await ports.adapters(1)
    for _ in range(3):
        await ports.start(adapter, Step())
    await let_others_run()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == 'dispatcher']


async def test_refusals_come_back_from_a_run_alone() -> None:
    """As they are."""
    ports = Ports()
    (adapter,) = await ports.adapters(1)
    ports.trainer.failures.append(InvalidField('features', 'are bad'))
    with pytest.raises(InvalidField):
        await ports.start(adapter, training())


async def _timed(ports: Ports, adapters: list[Adapter], *, seconds: float, away: float) -> None:
    """Run a batch of all adapters that takes so long, after they were away for so long."""
    ports.clock.advance(timedelta(seconds=away))
    ports.trainer.gate.clear()
    runs = [ports.start(adapter, training(10)) for adapter in adapters]
    await let_others_run()
    ports.clock.advance(timedelta(seconds=seconds))
    ports.trainer.gate.set()
    await asyncio.gather(*runs)


async def test_adapters_that_come_back_at_once_share_the_next_pass_too() -> None:
    """Those that are a moment later than the first are waited for, and nobody longer than they come."""
    ports = Ports()
    adapters = await ports.adapters(3)
    for _ in range(2):
        await _timed(ports, adapters, seconds=1000.0, away=1.0)
    first = ports.start(adapters[0], training(10))
    await let_others_run()
    assert not first.done()
    rest = [ports.start(adapter, training(10)) for adapter in adapters[1:]]
    await asyncio.gather(first, *rest)
    assert ports.trainer.batches[-1] == [adapter.adapter_id for adapter in adapters]


async def test_one_that_is_taken_back_while_others_are_waited_for_leaves_nothing_behind() -> None:
    """Nobody is waited for any more, and who comes at that very moment is served."""
    ports = Ports()
    adapters = await ports.adapters(3)
    for _ in range(2):
        await _timed(ports, adapters, seconds=1000.0, away=1.0)
    first = ports.start(adapters[0], training(10))
    await let_others_run()
    assert ports.dispatcher.cancel(adapters[0].adapter_id)
    second = ports.start(adapters[1], training(64))
    (outcome, run) = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(outcome, Cancelled)
    assert isinstance(run, VerbRun)
    third = ports.start(adapters[0], training(10))
    await let_others_run()
    assert ports.dispatcher.cancel(adapters[0].adapter_id)
    await let_others_run()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == 'dispatcher']
    with pytest.raises(Cancelled):
        await third
    assert isinstance(await ports.start(adapters[0], Step()), VerbRun)


async def test_what_is_quick_or_full_waits_for_nobody() -> None:
    """A step runs at once, and so does a batch with no room left."""
    ports = Ports()
    adapters = await ports.adapters(3)
    for _ in range(2):
        await _timed(ports, adapters, seconds=1000.0, away=1.0)
    await ports.start(adapters[0], Step())
    await ports.start(adapters[1], training(64))


async def test_who_does_not_come_back_is_given_up() -> None:
    """The wait is a small part of the batch's time; those that are usually away longer are not waited for at all."""
    ports = Ports()
    adapters = await ports.adapters(3)
    for _ in range(2):
        await _timed(ports, adapters, seconds=0.05, away=0.002)
    await ports.start(adapters[0], training(10))
    assert ports.trainer.batches[-1] == [adapters[0].adapter_id]
    slow = Ports()
    adapters = await slow.adapters(3)
    for _ in range(2):
        await _timed(slow, adapters, seconds=1000.0, away=500.0)
    await slow.start(adapters[0], training(10))
    assert slow.trainer.batches[-1] == [adapters[0].adapter_id]


async def test_passes_are_as_large_as_the_device_runs_in_time() -> None:
    """What earlier passes took bounds the next one; what does not fit waits for the one after it."""
    ports = Ports(Scheduler(batch_tokens=1024), batch_seconds=2.0)
    adapters = await ports.adapters(40)
    await _timed(ports, adapters, seconds=5.0, away=0.0)
    await _timed(ports, adapters, seconds=5.0, away=0.0)
    sizes = [len(batch) for batch in ports.trainer.batches]
    assert sizes[0] == 40
    assert sizes[1] == 16
    assert sum(sizes) == 80
