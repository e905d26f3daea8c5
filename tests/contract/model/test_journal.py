"""Contract tests of journals: in memory, on disk, and on disk with a reopening before each access."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures import journals
from fixtures.journals import add, batch_operation, forward_result, make_adapter, state_of, step_operation, step_result
from twinkle_services.kit.errors import AdapterNotFound, Code, DomainError
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.domain.adapter import ExpiredAdapter
from twinkle_services.model.domain.divergence import first_difference
from twinkle_services.model.domain.errors import AdapterDamaged, LossNotFinite
from twinkle_services.model.domain.journal import Snapshot
from twinkle_services.model.domain.result import PublishResult
from twinkle_services.model.ports import Journal

Reopen = Callable[[], Awaitable[Journal]]
"""Returns the journal as the next process would open it."""


@pytest.fixture(params=['memory', 'sqlite', 'sqlite-reopened'])
async def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Reopen]:
    """Each implementation; `sqlite-reopened` opens the journal on disk again at each call."""
    opened: list[Journal] = []

    async def next_journal() -> Journal:
        if opened and request.param != 'sqlite-reopened':
            return opened[-1]
        if opened:
            await opened.pop().close()
        journal = MemoryJournal(undo_steps=2) if request.param == 'memory' else None
        opened.append(journal or await journals.open_journal(tmp_path / 'journal', undo_steps=2))
        return opened[-1]

    yield next_journal
    for journal in opened:
        await journal.close()


async def test_adapter_and_its_creation_request_are_returned_unchanged(reopen):
    """Tenant, configuration and creation request of an adapter are returned unchanged."""
    journal = await reopen()
    adapter = await add(journal, make_adapter(user_metadata={'team': 'red'}))
    journal = await reopen()
    stored = await journal.adapters()
    assert [(item.adapter, item.is_settled) for item in stored] == [(adapter, True)]
    assert await journal.creations() == [journals.creation_of(adapter, 'ad-1')]


async def test_a_removed_adapter_leaves_only_its_creation_request(reopen):
    """A removed adapter cannot be restored; its creation request is kept in the journal."""
    journal = await reopen()
    await add(journal, make_adapter())
    await journal.accept(batch_operation(1))
    await journal.remove_adapter('ad-1')
    await journal.remove_adapter('ad-1')
    journal = await reopen()
    assert await journal.adapters() == []
    assert [creation.adapter_id for creation in await journal.creations()] == ['ad-1']
    assert (await journal.creation_of('ad-1')).request_id == 'ad-1'
    assert await journal.creation_of('ad-2') is None
    with pytest.raises(AdapterNotFound):
        await journal.snapshot_before('ad-1')
    with pytest.raises(AdapterNotFound):
        await journal.accept(batch_operation(2))


async def test_a_removed_adapter_is_recorded_as_expired(reopen):
    """The record of an expired adapter is stored with its removal, and only if the adapter existed."""
    journal = await reopen()
    await add(journal, make_adapter(session_end_time=journals.NOW))
    assert (await (await reopen()).adapters())[0].adapter.last_use_time == journals.NOW
    path = 'twinkle://ad-1/weights/last'
    first, unknown = (ExpiredAdapter(adapter_id=f'ad-{n}', tenant_id='alice', checkpoint_path=path) for n in (1, 2))
    for expired in (first, unknown, first):
        journal = await reopen()
        await journal.remove_adapter(expired.adapter_id, expired=expired)
    journal = await reopen()
    assert await journal.expired_adapters() == [first]
    assert (await journal.adapters(), (await journal.creation_of('ad-1')).request_id) == ([], 'ad-1')


@pytest.mark.parametrize('length', [12, 20_000], ids=['small', 'large'])
async def test_accepted_operations_are_returned_in_order(reopen, length):
    """Accepted operations of any size are returned unchanged, and are unsettled until their outcomes are recorded."""
    journal = await reopen()
    adapter = await add(journal, make_adapter())
    operations = [batch_operation(number, length=length, seed=number) for number in (1, 2, 3)]
    for operation in operations:
        await journal.accept(operation)
    journal.note(replace(adapter, sequence_number=1), operations[0], forward_result(operations[0]))
    journal = await reopen()
    entries = await journal.entries('ad-1', after=0)
    assert [entry.operation.payload for entry in entries] == [operation.payload for operation in operations]
    assert [entry.outcome is None for entry in entries] == [False, True, True]
    assert (await journal.adapters())[0].is_settled is False
    assert [entry.operation.sequence_number for entry in await journal.entries('ad-1', after=1, until=2)] == [2]


async def test_recorded_outcome_is_bitwise_unchanged(reopen):
    """A recorded result is bitwise unchanged, an error has its code and reason, and the adapter has the last number."""
    journal = await reopen()
    adapter = await add(journal, make_adapter())
    first, second = batch_operation(1), batch_operation(2)
    result, failure = forward_result(first, -float('inf')), LossNotFinite('ad-1', 3)
    await journal.accept(first)
    journal.note(replace(adapter, sequence_number=1), first, result)
    await journal.accept(second)
    journal.note(replace(adapter, sequence_number=2), second, failure)
    journal = await reopen()
    record = await journal.record('ad-1', size=64)
    assert first_difference(result, record[0].outcome) is None
    assert isinstance(record[1].outcome, DomainError)
    assert (record[1].outcome.code, record[1].outcome.reason) == (Code.FAILED_PRECONDITION, 'LOSS_NOT_FINITE')
    assert [entry.fingerprint for entry in record] == [first.fingerprint, second.fingerprint]
    stored = (await journal.adapters())[0]
    assert (stored.adapter.sequence_number, stored.is_settled) == (2, True)
    assert [entry.sequence_number for entry in await journal.record('ad-1', size=1)] == [2]


async def test_number_of_a_revoked_operation_is_available(reopen):
    """A revoked operation is deleted, and another operation may use its sequence number."""
    journal = await reopen()
    await add(journal, make_adapter())
    await journal.accept(batch_operation(1))
    await journal.revoke(batch_operation(1))
    journal = await reopen()
    assert (await journal.entries('ad-1', after=0), await journal.record('ad-1', size=9)) == ([], [])
    other = batch_operation(1, seed=9)
    await journal.accept(other)
    assert [entry.operation.payload for entry in await journal.entries('ad-1', after=0)] == [other.payload]


async def test_operation_replaces_an_earlier_one_without_outcome(reopen):
    """The last operation that is accepted with a number replaces an earlier operation without an outcome."""
    journal = await reopen()
    await add(journal, make_adapter())
    await journal.accept(batch_operation(1, length=20_000))
    await journal.accept(batch_operation(1, seed=4))
    journal = await reopen()
    entries = await journal.entries('ad-1', after=0)
    assert [entry.operation.payload for entry in entries] == [batch_operation(1, seed=4).payload]


async def test_settled_verb_is_recorded_and_not_replayed(reopen):
    """A state verb that did not change the engine is recorded for repeats and is not replayed."""
    journal = await reopen()
    adapter = await add(journal, make_adapter())
    await journal.accept(batch_operation(1))
    journal.note(replace(adapter, sequence_number=1), batch_operation(1), forward_result(batch_operation(1)))
    publish = journals.operation(2, publish_version={})
    published = journals.result(publish, PublishResult(version=1, digest='ab', size_bytes=9))
    await journal.settle(replace(adapter, sequence_number=2, version=1), publish, published)
    await journal.accept(batch_operation(3))
    journal = await reopen()
    assert [entry.operation.sequence_number for entry in await journal.entries('ad-1', after=0)] == [1, 3]
    assert first_difference(published, (await journal.record('ad-1', size=9))[1].outcome) is None
    assert (await journal.adapters())[0].adapter.version == 1


async def test_late_outcome_does_not_change_a_newer_adapter_record(reopen):
    """If an older outcome is recorded late, the adapter's newer record is not changed."""
    journal = await reopen()
    adapter = await add(journal, make_adapter())
    for number in (1, 2):
        await journal.accept(batch_operation(number))
    for number in (2, 1):
        journal.note(
            replace(adapter, sequence_number=number), batch_operation(number), forward_result(batch_operation(number))
        )
    journal = await reopen()
    assert (await journal.adapters())[0].adapter.sequence_number == 2


async def test_amendment_is_returned_unless_a_later_operation_is_recorded(reopen):
    """An amended adapter record is returned, unless a later operation is recorded."""
    journal = await reopen()
    adapter = await add(journal, make_adapter(session_id='ses-1'))
    saved = replace(adapter, checkpoint_path='twinkle://ad-1/weights/a')
    await journal.amend(saved)
    journal = await reopen()
    assert [item.adapter for item in await journal.adapters()] == [saved]
    operation = batch_operation(1)
    await journal.accept(operation)
    later = replace(saved, sequence_number=1, checkpoint_path='')
    journal.note(later, operation, forward_result(operation))
    await journal.amend(saved)
    journal = await reopen()
    assert [item.adapter for item in await journal.adapters()] == [later]
    with pytest.raises(AdapterNotFound):
        await journal.amend(make_adapter('ad-2'))


async def test_restore_starts_from_the_newest_snapshot(reopen):
    """The newest snapshot is returned unchanged; before the first snapshot, the adapter is returned as created."""
    journal = await reopen()
    adapter = await add(journal, make_adapter())
    first = await journal.snapshot_before('ad-1')
    assert (first.sequence_number, first.state, first.adapter) == (0, None, adapter)
    await _execute(journal, adapter, 1, 2, 3)
    after = replace(adapter, sequence_number=2, step_count=7)
    await journal.add_snapshot(Snapshot(sequence_number=2, adapter=after, state=replace(state_of(2), step_count=7)))
    journal = await reopen()
    found = await journal.snapshot_before('ad-1')
    assert (found.sequence_number, found.adapter) == (2, after)
    assert _is_equal_state(found.state, replace(state_of(2), step_count=7))
    assert (await journal.snapshot_before('ad-1', at_most=1)).sequence_number == 0
    assert [entry.operation.sequence_number for entry in await journal.entries('ad-1', after=2)] == [3]


async def test_adapter_created_from_a_checkpoint_has_a_snapshot(reopen):
    """An adapter created from a checkpoint has a snapshot of the checkpoint's state."""
    journal = await reopen()
    await add(journal, make_adapter(), state_of(4))
    journal = await reopen()
    found = await journal.snapshot_before('ad-1')
    assert (found.sequence_number, _is_equal_state(found.state, state_of(4))) == (0, True)


async def test_only_the_last_two_snapshots_are_kept(reopen):
    """A restore can start from each of the last two snapshots, and from no older snapshot."""
    journal = await reopen()
    adapter = await add(journal, make_adapter())
    for number in range(1, 13):
        await _execute(journal, adapter, number)
        if number % 3 == 0:
            after = replace(adapter, sequence_number=number)
            await journal.add_snapshot(Snapshot(sequence_number=number, adapter=after, state=state_of(number)))
    journal = await reopen()
    assert (await journal.snapshot_before('ad-1')).sequence_number == 12
    assert (await journal.snapshot_before('ad-1', at_most=11)).sequence_number == 9
    assert len(await journal.entries('ad-1', after=9)) == 3
    with pytest.raises(AdapterDamaged):
        await journal.snapshot_before('ad-1', at_most=8)
    with pytest.raises(AdapterDamaged):
        await journal.entries('ad-1', after=6)
    assert len(await journal.record('ad-1', size=64)) == 12


async def test_last_two_steps_can_be_undone(reopen):
    """The last two applied steps are reported, and the state before each of them can be restored."""
    journal = await reopen()
    adapter = await add(journal, make_adapter())
    for number in range(1, 21):
        await _execute(journal, adapter, number, is_step=number % 4 == 0)
        if number % 2 == 0:
            after = replace(adapter, sequence_number=number)
            await journal.add_snapshot(Snapshot(sequence_number=number, adapter=after, state=state_of(number)))
    journal = await reopen()
    assert list(await journal.applied_steps('ad-1')) == [16, 20]
    before = await journal.snapshot_before('ad-1', at_most=15)
    assert before.sequence_number == 14
    assert [entry.operation.sequence_number for entry in await journal.entries('ad-1', after=14, until=15)] == [15]


async def test_undone_step_is_not_reported(reopen):
    """Undone steps are not reported, and a restore starts from the state of the undo."""
    journal = await reopen()
    adapter = await add(journal, make_adapter())
    for number in range(1, 7):
        await _execute(journal, adapter, number, is_step=number % 2 == 0)
    undo = journals.operation(7, undo={'step_count': 1})
    await journal.settle(replace(adapter, sequence_number=7), undo, step_result(undo), state=state_of(5), undone_from=6)
    await _execute(journal, adapter, 8, is_step=True)
    journal = await reopen()
    assert list(await journal.applied_steps('ad-1')) == [4, 8]
    assert (await journal.snapshot_before('ad-1')).sequence_number == 7
    assert (await journal.snapshot_before('ad-1', at_most=3)).sequence_number == 0
    assert len(await journal.entries('ad-1', after=0, until=3)) == 3
    with pytest.raises(AdapterDamaged):
        await journal.entries('ad-1', after=0)


async def test_undone_steps_do_not_count_toward_the_undo_limit(reopen):
    """Earlier steps can still be undone after several later steps were undone."""
    journal = await reopen()
    adapter = await add(journal, make_adapter())
    await _execute(journal, adapter, 1)
    await _execute(journal, adapter, 2, is_step=True)
    number = 3
    for _ in range(5):
        await _execute(journal, adapter, number, is_step=True)
        undo = journals.operation(number + 1, undo={'step_count': 1})
        after = replace(adapter, sequence_number=number + 1)
        await journal.settle(after, undo, step_result(undo), state=state_of(2), undone_from=number)
        number += 2
    journal = await reopen()
    assert list(await journal.applied_steps('ad-1')) == [2]
    assert (await journal.snapshot_before('ad-1', at_most=1)).sequence_number == 0
    assert len(await journal.entries('ad-1', after=0, until=1)) == 1


async def _execute(journal, adapter, *numbers, is_step=False):
    for number in numbers:
        operation = (
            step_operation(number, adapter.adapter_id) if is_step else batch_operation(number, adapter.adapter_id)
        )
        await journal.accept(operation)
        outcome = step_result(operation) if is_step else forward_result(operation)
        journal.note(replace(adapter, sequence_number=number), operation, outcome)


def _is_equal_state(one, other):
    return (
        one.lora_config == other.lora_config
        and one.step_count == other.step_count
        and {name: (t.dtype, t.shape, bytes(t.data)) for name, t in {**one.adapter, **one.trainer}.items()}
        == {name: (t.dtype, t.shape, bytes(t.data)) for name, t in {**other.adapter, **other.trainer}.items()}
    )


async def test_attempts_at_other_work_are_counted_until_a_reset(reopen):
    """Attempts at work add up over restarts, by name, until a reset or the deletion of the adapter."""
    journal = await reopen()
    await add(journal, make_adapter())
    for count in (1, 2):
        journal = await reopen()
        assert await journal.count_attempt('Save of ad-1') == count
    assert await journal.count_attempt('Load of ad-1') == 1
    assert await journal.count_attempt('Save of ad-10') == 1
    journal.reset_attempts('Load of ad-1')
    journal = await reopen()
    assert await journal.count_attempt('Load of ad-1') == 1
    await journal.remove_adapter('ad-1')
    assert await journal.count_attempt('Save of ad-1') == 1
    assert await journal.count_attempt('Save of ad-10') == 2


async def test_progress_resets_the_count_of_attempts(reopen):
    """An attempt with more progress than all earlier attempts sets the count to 1; a reset removes the progress."""
    journal, work = await reopen(), 'restores of ad-1'
    counts = []
    for position in (0, 16, 16, 8, 32, 0):
        journal = await reopen()
        counts.append(await journal.count_attempt(work))
        if position:
            await journal.note_progress(work, position=position)
    assert counts == [1, 2, 2, 3, 4, 2]
    journal.reset_attempts(work)
    journal = await reopen()
    assert await journal.count_attempt(work) == 1
    await journal.note_progress(work, position=1)
    assert await journal.count_attempt(work) == 2


async def test_attempts_are_counted_until_one_completes(reopen):
    """Attempts to replay an operation add up over restarts; a completed attempt or a new request resets them."""
    journal = await reopen()
    await add(journal, make_adapter())
    operation = batch_operation(1)
    await journal.accept(operation)
    for count in (1, 2):
        journal = await reopen()
        assert await journal.begin_attempt(operation) == count
    journal.end_attempt(operation)
    journal = await reopen()
    assert await journal.begin_attempt(operation) == 1
    await journal.accept(operation)
    assert await journal.begin_attempt(operation) == 1
    await journal.remove_adapter('ad-1')
    journal.end_attempt(operation)
    await reopen()
