"""How adapters come into the engine and leave it."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from fixtures import journals
from fixtures.crashing import StrictStore, create, start
from services.kit.errors import Internal
from services.model.backends.journal.memory import MemoryJournal
from services.model.domain.errors import AdapterDamaged, BatchTooLarge, JournalUnavailable
from services.model.domain.result import OperationResult
from twinkle.api.model.v1 import operation_pb2 as wire


@pytest.fixture
def journal() -> MemoryJournal:
    """A journal that outlives the service."""
    return MemoryJournal()


async def test_no_more_are_resident_than_may_be_and_all_train_on(journal):
    """Eight adapters take turns in an engine for three; each comes back as it was."""
    service = await start(journal, StrictStore(), resident_adapters=3)
    ids = [await create(service, f'r{index}', seed=index + 1) for index in range(8)]
    for number in (1, 2, 3):
        for adapter_id in ids:
            result = await service.execute(journals.step_operation(number, adapter_id))
            assert isinstance(result, OperationResult)
            assert result.outcome.step_count == number
            assert len(service.trainer.adapters) <= 3


async def test_the_one_used_least_lately_leaves(journal):
    """Those in use stay."""
    service = await start(journal, StrictStore(), resident_adapters=2)
    first, second = [await create(service, f'r{index}') for index in range(2)]
    await service.execute(journals.step_operation(1, second))
    await service.execute(journals.step_operation(1, first))
    third = await create(service, 'r3')
    assert set(service.trainer.adapters) == {first, third}


async def test_one_in_the_middle_of_something_leaves_last_and_loses_nothing(journal):
    """A Forward that waits for its Backward is run again where its adapter had to leave after all."""
    service = await start(journal, StrictStore(), resident_adapters=2)
    first, second = [await create(service, f'r{index}') for index in range(2)]
    await service.execute(journals.forward_operation(1, first))
    await service.execute(journals.step_operation(1, second))
    third = await create(service, 'r3')
    assert set(service.trainer.adapters) == {first, third}
    await service.execute(journals.forward_operation(1, third))
    await service.execute(journals.step_operation(2, second))
    assert first not in service.trainer.adapters
    result = await service.execute(journals.operation(2, first, backward={}))
    assert isinstance(result, OperationResult)


async def test_many_who_want_one_adapter_bring_it_in_once(journal):
    """A repeat, a look-up and the next operation at the same time make it again once."""
    service = await start(journal, StrictStore(), resident_adapters=1)
    first = await create(service, 'r1')
    for number in (1, 2):
        await service.execute(journals.batch_operation(number, first))
    await create(service, 'r2')
    service = await start(journal, StrictStore(), resident_adapters=1)
    made = []
    restore_adapter = service.trainer.restore_adapter

    async def count(adapter_id, state):
        made.append(adapter_id)
        await asyncio.sleep(0)
        return await restore_adapter(adapter_id, state)

    service.trainer.restore_adapter = count
    await asyncio.gather(
        *(service.execute(journals.step_operation(3, first)) for _ in range(3)),
        service.execute(journals.batch_operation(4, first)),
    )
    assert made == [first]


async def test_what_is_idle_leaves_by_itself_with_its_queue(journal):
    """Nothing of it stays in memory but its place in the directory; a repeat is still answered from the record."""
    service = await start(journal, StrictStore(), idle_seconds=60.0)
    adapter_id = await create(service)
    first = await service.execute(journals.batch_operation(1, adapter_id))
    await service.verbs.upkeep()
    assert service.trainer.adapters
    service.clock.advance(timedelta(seconds=61))
    await service.verbs.upkeep()
    assert not service.trainer.adapters
    assert len(service.verbs.upkeep._queues) == 0  # noqa: SLF001 - memory has no verb
    again = await service.execute(journals.batch_operation(1, adapter_id))
    assert again.is_replayed
    assert again.outcome.loss == first.outcome.loss
    assert not service.trainer.adapters


async def test_an_operation_that_cannot_be_made_durable_leaves_no_trace(journal):
    """What it did to the engine is dropped; sent again, it is applied once."""
    service, twin = await start(journal, StrictStore()), await start(MemoryJournal(), StrictStore())
    adapter_id, twin_id = await create(service), await create(twin)
    await service.execute(journals.batch_operation(1, adapter_id))
    await twin.execute(journals.batch_operation(1, twin_id))
    accept, failures = journal.accept, [JournalUnavailable(adapter_id)]

    async def refuse(operation):
        if failures:
            raise failures.pop()
        await accept(operation)

    journal.accept = refuse
    refused = await service.execute(journals.step_operation(2, adapter_id))
    assert isinstance(refused, JournalUnavailable)
    for one, name in ((service, adapter_id), (twin, twin_id)):
        result = await one.execute(journals.step_operation(2, name))
        assert (result.outcome.step_count, result.is_replayed) == (1, False)
    assert _weights(service, adapter_id) == _weights(twin, twin_id)


async def test_a_defect_of_the_engine_uses_up_the_number_and_changes_nothing(journal):
    """What it left behind is dropped, also when the adapter is made again later."""
    service = await start(journal, StrictStore())
    adapter_id = await create(service)
    await service.execute(journals.batch_operation(1, adapter_id))
    service.trainer.failures.append(RuntimeError('a defect'))
    outcome = await _attempt(service, journals.step_operation(2, adapter_id))
    assert isinstance(outcome, RuntimeError | Internal)
    assert (await journal.record(adapter_id, size=1))[0].sequence_number == 2
    result = await service.execute(journals.step_operation(3, adapter_id))
    assert result.outcome.step_count == 1
    service = await start(journal, StrictStore())
    result = await service.execute(journals.step_operation(4, adapter_id))
    assert result.outcome.step_count == 2


@pytest.mark.parametrize('error', [RuntimeError('a defect'), AdapterDamaged('ad-1', 'bytes that changed')])
async def test_an_adapter_that_could_not_come_in_once_leaves_no_gap(journal, error):
    """The number is used up in the journal, too: later operations, and a restart after them, find all of it."""
    service = await start(journal, StrictStore(), resident_adapters=1)
    adapter_id = await create(service)
    await service.execute(journals.batch_operation(1, adapter_id))
    await create(service, 'r2')
    restore_adapter, failures = service.trainer.restore_adapter, [error]

    async def fail_once(*args):
        if failures:
            raise failures.pop()
        return await restore_adapter(*args)

    service.trainer.restore_adapter = fail_once
    assert isinstance(await _attempt(service, journals.step_operation(2, adapter_id)), type(error))
    result = await service.execute(journals.step_operation(3, adapter_id))
    assert result.outcome.step_count == 1
    service = await start(journal, StrictStore())
    result = await service.execute(journals.step_operation(4, adapter_id))
    assert result.outcome.step_count == 2


async def test_an_operation_that_meets_a_defect_again_does_not_keep_its_adapter_away(journal):
    """One that the last process died of is passed over; what comes after it is applied, now and after a restart."""
    service = await start(journal, StrictStore(), resident_adapters=1)
    adapter_id = await create(service)
    await service.execute(journals.batch_operation(1, adapter_id))
    await create(service, 'r2')
    service = await start(journal, StrictStore())
    deadly = journals.step_operation(2, adapter_id)
    await journal.accept(deadly)
    service.trainer.failures.append(Internal(''))
    assert isinstance(await service.execute(deadly), Internal)
    assert service.verbs.directory.find(adapter_id).sequence_number == 2
    result = await service.execute(journals.step_operation(3, adapter_id))
    assert result.outcome.step_count == 1
    service = await start(journal, StrictStore())
    result = await service.execute(journals.step_operation(4, adapter_id))
    assert result.outcome.step_count == 2


async def test_memory_that_runs_out_in_the_middle_of_a_step_tears_nothing(journal):
    """What the step had done by then is dropped; sent again, it is applied once."""
    service, twin = await start(journal, StrictStore()), await start(MemoryJournal(), StrictStore())
    adapter_id, twin_id = await create(service), await create(twin)
    await service.execute(journals.batch_operation(1, adapter_id))
    await twin.execute(journals.batch_operation(1, twin_id))
    run, failures = service.trainer.run, [BatchTooLarge(token_count=0, token_limit=1)]

    async def run_out_once(name, verb):
        done = await run(name, verb)
        if failures:
            raise failures.pop()
        return done

    service.trainer.run = run_out_once
    refused = await _attempt(service, journals.step_operation(2, adapter_id))
    assert isinstance(refused, BatchTooLarge)
    for one, name in ((service, adapter_id), (twin, twin_id)):
        result = await one.execute(journals.step_operation(2, name))
        assert (result.outcome.step_count, result.is_replayed) == (1, False)
    assert _weights(service, adapter_id) == _weights(twin, twin_id)


async def test_a_load_that_cannot_be_made_durable_changes_nothing(journal):
    """What was loaded is dropped where no snapshot of it could be taken."""
    service = await start(journal, StrictStore())
    adapter_id = await create(service)
    await service.execute(journals.operation(1, adapter_id, save=wire.Save(name='s')))
    await service.execute(journals.batch_operation(2, adapter_id))
    await service.execute(journals.step_operation(3, adapter_id))
    before = _weights(service, adapter_id)
    snapshot, failures = service.trainer.snapshot, [BatchTooLarge(token_count=0, token_limit=1)]

    async def fail_once(name):
        if failures:
            raise failures.pop()
        return await snapshot(name)

    service.trainer.snapshot = fail_once
    load = wire.Load(checkpoint_path=f'twinkle://{adapter_id}/weights/s')
    assert isinstance(await _attempt(service, journals.operation(4, adapter_id, load=load)), BatchTooLarge)
    await service.execute(journals.operation(4, adapter_id, zero_grad={}))
    assert _weights(service, adapter_id) == before


async def test_a_divergence_is_counted_and_training_goes_on(journal):
    """A replay that does not come out as on record is told, not hidden."""
    service = await start(journal, StrictStore())
    adapter_id = await create(service)
    await service.execute(journals.batch_operation(1, adapter_id))
    await service.execute(journals.batch_operation(2, adapter_id))
    row = journal._adapters[adapter_id].rows[1]  # noqa: SLF001 - a record that is wrong
    row.outcome = replace(row.outcome, outcome=replace(row.outcome.outcome, loss=0.25))
    service = await start(journal, StrictStore())
    assert isinstance(await service.execute(journals.step_operation(3, adapter_id)), OperationResult)
    assert service.verbs.upkeep._residency.restore.divergence_count == 1  # noqa: SLF001


async def test_a_creation_is_known_after_a_restart(journal):
    """The same request again returns the same adapter, also from another process."""
    service = await start(journal, StrictStore())
    adapter_id = await create(service)
    service = await start(journal, StrictStore())
    assert await create(service) == adapter_id


async def _attempt(service, operation):
    (outcome,) = await asyncio.gather(service.execute(operation), return_exceptions=True)
    return outcome


def _weights(service, adapter_id):
    return service.trainer.adapters[adapter_id].weights.tobytes()
