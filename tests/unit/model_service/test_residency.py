"""Tests of how adapters are loaded into the engine and evicted."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from fixtures import journals
from fixtures.crashing import StrictStore, create, start
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle_services.kit.errors import Internal
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.domain.errors import AdapterDamaged, BatchTooLarge, JournalUnavailable, OperationNotFound
from twinkle_services.model.domain.result import OperationResult


@pytest.fixture
def journal() -> MemoryJournal:
    """Journal that outlives the service."""
    return MemoryJournal()


async def test_resident_adapters_are_limited_and_all_train(journal):
    """Eight adapters train in an engine with memory for three; each continues its step count."""
    service = await start(journal, StrictStore(), resident_adapters=3)
    ids = [await create(service, f'r{index}', seed=index + 1) for index in range(8)]
    for number in (1, 2, 3):
        for adapter_id in ids:
            result = await service.execute(journals.step_operation(number, adapter_id))
            assert isinstance(result, OperationResult)
            assert result.outcome.step_count == number
            assert len(service.trainer.adapters) <= 3


async def test_the_least_recently_used_adapter_is_evicted(journal):
    """The least recently used adapter is evicted when another adapter needs its memory."""
    service = await start(journal, StrictStore(), resident_adapters=2)
    first, second = [await create(service, f'r{index}') for index in range(2)]
    await service.execute(journals.step_operation(1, second))
    await service.execute(journals.step_operation(1, first))
    third = await create(service, 'r3')
    assert set(service.trainer.adapters) == {first, third}


async def test_adapter_with_a_pending_forward_is_evicted_last(journal):
    """An adapter with a pending Forward is evicted last, and its Forward is run again."""
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


async def test_concurrent_requests_load_an_adapter_once(journal):
    """Concurrent requests for one adapter load it once."""
    service = await start(journal, StrictStore(), resident_adapters=1)
    first = await create(service, 'r1')
    for number in (1, 2):
        await service.execute(journals.batch_operation(number, first))
    await create(service, 'r2')
    service = await start(journal, StrictStore(), resident_adapters=1)
    restored = []
    restore_adapter = service.trainer.restore_adapter

    async def count(adapter_id, state):
        restored.append(adapter_id)
        await asyncio.sleep(0)
        return await restore_adapter(adapter_id, state)

    service.trainer.restore_adapter = count
    await asyncio.gather(
        *(service.execute(journals.step_operation(3, first)) for _ in range(3)),
        service.execute(journals.batch_operation(4, first)),
    )
    assert restored == [first]


async def test_an_idle_adapter_is_evicted_with_its_queue(journal):
    """An idle adapter and its queue are removed from memory; repeats still return the recorded results."""
    service = await start(journal, StrictStore(), idle_seconds=60.0)
    adapter_id = await create(service)
    first = await service.execute(journals.batch_operation(1, adapter_id))
    await service.verbs.cleanup()
    assert service.trainer.adapters
    service.clock.advance(timedelta(seconds=61))
    await service.verbs.cleanup()
    assert not service.trainer.adapters
    assert len(service.verbs.cleanup._queues) == 0  # noqa: SLF001 - no method reports the queues
    repeated = await service.execute(journals.batch_operation(1, adapter_id))
    assert repeated.is_replayed
    assert repeated.outcome.loss == first.outcome.loss
    assert not service.trainer.adapters


async def test_operation_that_cannot_be_made_durable_is_dropped(journal):
    """If an operation cannot be made durable, its effect is dropped; a repeated request applies it once."""
    service, reference = await start(journal, StrictStore()), await start(MemoryJournal(), StrictStore())
    adapter_id, reference_id = await create(service), await create(reference)
    await service.execute(journals.batch_operation(1, adapter_id))
    await reference.execute(journals.batch_operation(1, reference_id))
    accept, failures = journal.accept, [JournalUnavailable(adapter_id)]

    async def refuse(operation):
        if failures:
            raise failures.pop()
        await accept(operation)

    journal.accept = refuse
    refused = await service.execute(journals.step_operation(2, adapter_id))
    assert isinstance(refused, JournalUnavailable)
    for one, name in ((service, adapter_id), (reference, reference_id)):
        result = await one.execute(journals.step_operation(2, name))
        assert (result.outcome.step_count, result.is_replayed) == (1, False)
    assert _weights(service, adapter_id) == _weights(reference, reference_id)


async def test_a_restored_outcome_that_the_disk_refuses_delays_the_adapter(journal):
    """Calls fail until a replayed operation's outcome can be written; then the adapter continues."""
    service = await start(journal, StrictStore())
    adapter_id = await create(service)
    await service.execute(journals.batch_operation(1, adapter_id))
    write_note, refused = journal.note, []
    journal.note = lambda *note: refused.append(note)
    await service.execute(journals.step_operation(2, adapter_id))
    service = await start(journal, StrictStore())
    for _ in range(2):
        assert isinstance(await service.execute(journals.batch_operation(3, adapter_id)), JournalUnavailable)
    journal.note = write_note
    for note in refused:
        write_note(*note)
    assert isinstance(await service.execute(journals.batch_operation(3, adapter_id)), OperationResult)
    result = await service.execute(journals.step_operation(4, adapter_id))
    assert result.outcome.step_count == 2


async def test_an_outcome_lost_before_the_snapshot_does_not_block_the_adapter(journal):
    """If an outcome is lost and a snapshot includes its operation, only a repeat of this operation fails."""
    service = await start(journal, StrictStore(), snapshot_operations=2)
    adapter_id = await create(service)
    write_note = journal.note
    journal.note = lambda *note: None
    await service.execute(journals.batch_operation(1, adapter_id))
    await service.journal.count_attempt('writes the notes')
    journal.note = write_note
    await service.execute(journals.step_operation(2, adapter_id))
    await service.verbs.cleanup._residency.close()  # noqa: SLF001 - waits for the snapshot
    service = await start(journal, StrictStore())
    assert isinstance(await service.execute(journals.batch_operation(3, adapter_id)), OperationResult)
    assert isinstance(await service.execute(journals.batch_operation(1, adapter_id)), OperationNotFound)


async def test_a_defect_of_the_engine_consumes_the_number_and_changes_nothing(journal):
    """A defect consumes the operation's number, and the operation has no effect, even after a restart."""
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
async def test_failed_load_of_an_adapter_leaves_no_gap(journal, error):
    """If an adapter cannot be loaded, the operation's number is consumed in the journal too."""
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


async def test_operation_with_a_repeated_defect_is_skipped(journal):
    """An operation that fails with a defect again during the restore is skipped, and later operations are applied."""
    service = await start(journal, StrictStore(), resident_adapters=1)
    adapter_id = await create(service)
    await service.execute(journals.batch_operation(1, adapter_id))
    await create(service, 'r2')
    service = await start(journal, StrictStore())
    failing = journals.step_operation(2, adapter_id)
    await journal.accept(failing)
    service.trainer.failures.append(Internal(''))
    assert isinstance(await service.execute(failing), Internal)
    assert service.verbs.directory.find(adapter_id).sequence_number == 2
    result = await service.execute(journals.step_operation(3, adapter_id))
    assert result.outcome.step_count == 1
    service = await start(journal, StrictStore())
    result = await service.execute(journals.step_operation(4, adapter_id))
    assert result.outcome.step_count == 2


async def test_step_without_enough_memory_is_dropped(journal):
    """If memory is exhausted during a step, the step has no effect; a repeated request applies it once."""
    service, reference = await start(journal, StrictStore()), await start(MemoryJournal(), StrictStore())
    adapter_id, reference_id = await create(service), await create(reference)
    await service.execute(journals.batch_operation(1, adapter_id))
    await reference.execute(journals.batch_operation(1, reference_id))
    run, failures = service.trainer.run, [BatchTooLarge(token_count=0, token_limit=1)]

    async def exhaust_memory_once(name, verb):
        done = await run(name, verb)
        if failures:
            raise failures.pop()
        return done

    service.trainer.run = exhaust_memory_once
    refused = await _attempt(service, journals.step_operation(2, adapter_id))
    assert isinstance(refused, BatchTooLarge)
    for one, name in ((service, adapter_id), (reference, reference_id)):
        result = await one.execute(journals.step_operation(2, name))
        assert (result.outcome.step_count, result.is_replayed) == (1, False)
    assert _weights(service, adapter_id) == _weights(reference, reference_id)


async def test_a_load_that_cannot_be_made_durable_changes_nothing(journal):
    """If the state after a load cannot be stored as a snapshot, the load is dropped."""
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


async def test_divergence_is_counted_and_training_continues(journal):
    """A replay that differs from the record is counted, and training continues."""
    service = await start(journal, StrictStore())
    adapter_id = await create(service)
    await service.execute(journals.batch_operation(1, adapter_id))
    await service.execute(journals.batch_operation(2, adapter_id))
    row = journal._adapters[adapter_id].rows[1]  # noqa: SLF001 - the test falsifies a record
    row.outcome = replace(row.outcome, outcome=replace(row.outcome.outcome, loss=0.25))
    service = await start(journal, StrictStore())
    assert isinstance(await service.execute(journals.step_operation(3, adapter_id)), OperationResult)
    assert service.verbs.cleanup._residency.restore.divergence_count == 1  # noqa: SLF001


async def test_a_creation_is_known_after_a_restart(journal):
    """A repeated request returns the same adapter after a restart."""
    service = await start(journal, StrictStore())
    adapter_id = await create(service)
    service = await start(journal, StrictStore())
    assert await create(service) == adapter_id


async def _attempt(service, operation):
    (outcome,) = await asyncio.gather(service.execute(operation), return_exceptions=True)
    return outcome


def _weights(service, adapter_id):
    return service.trainer.adapters[adapter_id].weights.tobytes()
