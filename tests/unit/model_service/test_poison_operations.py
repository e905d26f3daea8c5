"""An operation that crashes the service whenever it runs fails after a bounded number of attempts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures import journals
from fixtures.crashing import ALICE, Died, PoisonedTrainer, Service, StrictStore, create, start
from twinkle.api.model.v1 import operation_pb2
from twinkle_services.kit.errors import Disposition
from twinkle_services.model.application.attempts import MAX_ATTEMPTS
from twinkle_services.model.application.restore import MAX_RESTORES
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.domain.divergence import first_difference
from twinkle_services.model.domain.errors import AdapterDamaged, CreationCrashed, OperationCrashed
from twinkle_services.model.domain.operation import ExportMerged, Load, Operation, PublishVersion, Save
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.ports import Journal

POISON = 29
"""Number of tokens of the batch that crashes the trainer."""


@pytest.fixture(params=['memory', 'sqlite'])
async def journal(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Journal]:
    """Each implementation of the journal; it outlives the service."""
    opened = MemoryJournal() if request.param == 'memory' else await journals.open_journal(tmp_path / 'journal')
    yield opened
    await opened.close()


def _poison(number: int, adapter_id: str) -> Any:
    return journals.batch_operation(number, adapter_id, length=POISON)


async def _crash_during(service: Service, *operations: Any) -> None:
    outcomes = await asyncio.gather(*map(service.execute, operations), return_exceptions=True)
    assert any(isinstance(outcome, Died) for outcome in outcomes)


async def _serve_after_crashes(journal: Journal, store: StrictStore) -> Service:
    """Start the service until it does not crash; check the number of starts, and return the service."""
    for _ in range(MAX_ATTEMPTS - 1):
        with pytest.raises(Died):
            await start(journal, store, trainer=PoisonedTrainer(POISON))
    return await start(journal, store, trainer=PoisonedTrainer(POISON))


async def _train(service: Service, adapter_id: str, numbers: range) -> list[OperationResult]:
    results: list[OperationResult] = []
    for number in numbers:
        make = journals.batch_operation if number % 2 else journals.step_operation
        results.append(await service.execute(make(number, adapter_id)))
    return results


@pytest.mark.parametrize('is_culprit_older', [False, True])
async def test_only_the_poisoned_operation_fails(journal: Journal, *, is_culprit_older: bool) -> None:
    """Only the poisoned operation of a shared pass fails, and the other adapter is bitwise unaffected."""
    store = StrictStore()
    service = await start(journal, store, trainer=PoisonedTrainer(POISON))
    names = ['culprit', 'innocent'] if is_culprit_older else ['innocent', 'culprit']
    ids = {name: await create(service, name) for name in names}
    results = await _train(service, ids['innocent'], range(1, 3))
    await _train(service, ids['culprit'], range(1, 3))
    await _crash_during(service, journals.batch_operation(3, ids['innocent']), _poison(3, ids['culprit']))
    service = await _serve_after_crashes(journal, store)
    results += await _train(service, ids['innocent'], range(3, 7))
    reference = await create(service, 'reference')
    expected = await _train(service, reference, range(1, 7))
    assert [first_difference(*pair) for pair in zip(expected, results, strict=True)] == [None] * 6


async def test_poisoned_adapter_continues_from_its_last_good_state(journal: Journal) -> None:
    """The failed operation keeps its number and error; its adapter continues as if the operation had never run."""
    store = StrictStore()
    service = await start(journal, store, trainer=PoisonedTrainer(POISON))
    adapter_id = await create(service, 'culprit')
    await _train(service, adapter_id, range(1, 3))
    await _crash_during(service, _poison(3, adapter_id))
    service = await _serve_after_crashes(journal, store)
    assert not service.verbs.is_resident(adapter_id)
    for _ in range(2):
        error = await service.execute(_poison(3, adapter_id))
        assert (error.reason, error.disposition) == (OperationCrashed.reason, Disposition.FAILED)
        assert error.metadata() == {'adapterId': adapter_id, 'sequenceNumber': '3'}
        service = await start(journal, store)
    found = [
        await service.execute(journals.batch_operation(4, adapter_id, seed=8)),
        await service.execute(journals.step_operation(5, adapter_id)),
    ]
    reference = await create(service, 'reference')
    await _train(service, reference, range(1, 3))
    expected = [
        await service.execute(journals.batch_operation(3, reference, seed=8)),
        await service.execute(journals.step_operation(4, reference)),
    ]
    assert [first_difference(*pair) for pair in zip(expected, found, strict=True)] == [None, None]


async def test_crashes_outside_the_replay_are_not_counted(journal: Journal) -> None:
    """Crashes before the replay of an operation, and restarts after its successful replay, do not make it fail."""
    store = StrictStore()
    service = await start(journal, store, trainer=PoisonedTrainer(POISON))
    adapter_id = await create(service, 'r1')
    await _crash_during(service, _poison(1, adapter_id))
    for moment_limit in (1, 2, 3, 4, 5, 6):
        with pytest.raises(Died):
            await start(journal, store, moment_limit=moment_limit)
    for _ in range(MAX_ATTEMPTS):
        await (await start(journal, store)).verbs.close()
    outcome = await (await start(journal, store)).execute(_poison(1, adapter_id))
    assert isinstance(outcome, OperationResult)


async def _count_crashes(journal: Journal, store: StrictStore, trainer: Callable[[], PoisonedTrainer]) -> int:
    """Start the service until it serves; return the number of crashes."""
    for crashes in range(3 * MAX_RESTORES):
        try:
            await (await start(journal, store, trainer=trainer())).verbs.close()
        except Died:
            continue
        return crashes
    raise AssertionError('the service never serves')


@pytest.mark.parametrize('cause', ['snapshot', 'recorded operation'])
async def test_adapter_that_crashes_each_restore_is_reported_as_damaged(journal: Journal, cause: str) -> None:
    """A snapshot or a recorded operation that crashes each restore affects only its own adapter."""
    store = StrictStore()
    service = await start(journal, store, snapshot_operations=1 if cause == 'snapshot' else 100)
    culprit, innocent = await create(service, 'culprit'), await create(service, 'innocent')
    results = await _train(service, innocent, range(1, 3))
    assert isinstance(await service.execute(_poison(1, culprit)), OperationResult)
    # Accepting an operation makes earlier outcomes durable.
    await service.execute(journals.step_operation(2, culprit))
    await service.verbs.close()
    # An operation without an outcome is replayed at the next start, after the snapshot and the recorded operations.
    await journal.accept(journals.batch_operation(3, culprit))

    def trainer() -> PoisonedTrainer:
        return PoisonedTrainer(adapter_id=culprit) if cause == 'snapshot' else PoisonedTrainer(POISON)

    assert await _count_crashes(journal, store, trainer) == MAX_RESTORES
    service = await start(journal, store, trainer=trainer())
    for _ in range(2):
        assert (await service.execute(journals.batch_operation(4, culprit))).reason == AdapterDamaged.reason
    results += await _train(service, innocent, range(3, 7))
    expected = await _train(service, await create(service, 'reference'), range(1, 7))
    assert [first_difference(*pair) for pair in zip(expected, results, strict=True)] == [None] * 6


async def test_restore_with_progress_before_each_crash_is_no_crash_loop(journal: Journal) -> None:
    """A long restore that makes progress before each crash does not damage the adapter, after any number of crashes."""
    store = StrictStore()
    service = await start(journal, store, snapshot_operations=1000)
    adapter_id = await create(service, 'long')
    for number in range(1, 201):
        await service.execute(journals.batch_operation(number, adapter_id))
    await service.verbs.close()
    await journal.accept(journals.batch_operation(201, adapter_id))
    for run_limit in range(20, 200, 18):
        with pytest.raises(Died):
            await start(journal, store, trainer=PoisonedTrainer(run_limit=run_limit))
    service = await start(journal, store)
    assert isinstance(await service.execute(journals.batch_operation(202, adapter_id)), OperationResult)


async def test_operator_can_allow_crashed_restores_again(tmp_path: Path) -> None:
    """An adapter that was reported as damaged trains again after the operator has reset the crash counts."""
    store, folder = StrictStore(), tmp_path / 'journal'
    journal = await journals.open_journal(folder)
    service = await start(journal, store)
    adapter_id = await create(service, 'given up')
    assert isinstance(await service.execute(_poison(1, adapter_id)), OperationResult)
    # Accepting an operation makes earlier outcomes durable.
    await service.execute(journals.step_operation(2, adapter_id))
    await service.verbs.close()
    await journal.accept(journals.batch_operation(3, adapter_id))
    await _count_crashes(journal, store, lambda: PoisonedTrainer(POISON))
    refused = await (await start(journal, store)).execute(journals.batch_operation(4, adapter_id))
    assert (refused.reason, 'forget_crashes: true' in refused.problem) == (AdapterDamaged.reason, True)
    for is_crash_forgotten in (True, False):
        await journal.close()
        journal = await journals.open_journal(folder)
        if is_crash_forgotten:
            await journal.forget_crashes()
        service = await start(journal, store)
        number = 4 if is_crash_forgotten else 5
        assert isinstance(await service.execute(journals.batch_operation(number, adapter_id)), OperationResult)
        await service.verbs.close()
    await journal.close()


async def test_failed_operations_are_progress(journal: Journal) -> None:
    """Any number of operations that crash the service fail one by one, and their adapter is not damaged."""
    store = StrictStore()
    service = await start(journal, store, trainer=PoisonedTrainer(POISON))
    adapter_id = await create(service, 'culprit')
    poisons = [_poison(number, adapter_id) for number in range(1, MAX_RESTORES + 2)]
    for operation in poisons:
        await journal.accept(operation)
    await _count_crashes(journal, store, lambda: PoisonedTrainer(POISON))
    service = await start(journal, store, trainer=PoisonedTrainer(POISON))
    for operation in poisons:
        assert (await service.execute(operation)).reason == OperationCrashed.reason
    outcome = await service.execute(journals.batch_operation(len(poisons) + 1, adapter_id))
    assert isinstance(outcome, OperationResult)


STATE_VERBS: dict[str, tuple[str, Any]] = {
    'save': ('export_state', Save(name='poison')),
    'publish': ('export_state', PublishVersion()),
    'load': ('import_state', Load(checkpoint_path='twinkle://first/weights/start')),
    'export': ('export_state', ExportMerged(name='poison')),
}
"""Verbs that call other services, each with the method of the trainer that crashes. Undo is not included, because a
crash in an undo is a crash in a restore."""


@pytest.mark.parametrize('name', STATE_VERBS)
async def test_state_verb_that_crashes_each_time_fails(journal: Journal, name: str) -> None:
    """A repeated state verb fails after `MAX_ATTEMPTS` crashes; other verbs and later state verbs run."""
    method, verb = STATE_VERBS[name]
    store = StrictStore()
    service = await start(journal, store)
    culprit, innocent = await create(service, 'culprit'), await create(service, 'innocent')
    await store.save('first', journals.state_of(1), base_model='', save=Save(name='start'), request_id='s1')
    results = await _train(service, innocent, range(1, 3))
    await _train(service, culprit, range(1, 3))
    await service.execute(journals.operation(3, culprit, save=operation_pb2.Save(name='known')))
    await service.verbs.close()
    poison = replace(journals.step_operation(4, culprit), verb=verb)
    for _ in range(MAX_ATTEMPTS):
        service = await start(journal, store, trainer=PoisonedTrainer(method=method))
        with pytest.raises(Died):
            await service.verbs.execute_operation(ALICE, poison, is_waiting_allowed=True)
    service = await start(journal, store, trainer=PoisonedTrainer(method=method))
    for _ in range(2):
        assert (await service.execute(poison)).reason == OperationCrashed.reason
    results += await _train(service, innocent, range(3, 7))
    assert isinstance(await service.execute(journals.batch_operation(5, culprit)), OperationResult)
    with pytest.raises(Died):
        await service.verbs.execute_operation(ALICE, replace(poison, sequence_number=6), is_waiting_allowed=True)
    service = await start(journal, store)
    expected = await _train(service, await create(service, 'reference'), range(1, 7))
    assert [first_difference(*pair) for pair in zip(expected, results, strict=True)] == [None] * 6


@pytest.mark.parametrize('method', ['create_adapter', 'import_state'])
async def test_creation_that_crashes_each_time_fails(journal: Journal, method: str) -> None:
    """A repeated creation fails after `MAX_ATTEMPTS` crashes; other creations and a later attempt succeed."""
    store = StrictStore()
    path = ''
    if method == 'import_state':
        service = await start(journal, store)
        await service.execute(journals.operation(1, await create(service), save=operation_pb2.Save(name='start')))
        (path,) = store.checkpoints
    for _ in range(MAX_ATTEMPTS):
        service = await start(journal, store, trainer=PoisonedTrainer(method=method))
        with pytest.raises(Died):
            await create(service, 'poison', checkpoint_path=path)
    service = await start(journal, store, trainer=PoisonedTrainer(method=method))
    with pytest.raises(CreationCrashed):
        await create(service, 'poison', checkpoint_path=path)
    await service.journal.close()
    service = await start(journal, store)
    assert await create(service, 'innocent', checkpoint_path=path)
    assert await create(service, 'poison', checkpoint_path=path)


async def test_operator_can_allow_crashed_creations_again(tmp_path: Path) -> None:
    """A creation that reached the crash limit runs again after the operator has reset the counts."""
    store, journal = StrictStore(), await journals.open_journal(tmp_path / 'journal')
    for _ in range(MAX_ATTEMPTS):
        service = await start(journal, store, trainer=PoisonedTrainer(method='create_adapter'))
        with pytest.raises(Died):
            await create(service, 'unlucky')
    await journal.forget_crashes()
    for _ in range(MAX_ATTEMPTS):
        service = await start(journal, store, trainer=PoisonedTrainer(method='create_adapter'))
        with pytest.raises(Died):
            await create(service, 'unlucky')
    await journal.close()


class _SlowJournal(MemoryJournal):
    """A journal whose writes take longer than the process runs before its crash."""

    def __init__(self) -> None:
        super().__init__()
        self.process: Service | None = None
        """Process that uses the journal."""

    async def accept(self, operation: Operation) -> None:
        """Record the operation after other tasks have run, unless the process crashes first."""
        for _ in range(200):
            await asyncio.sleep(0)
        assert self.process is not None
        self.process.journal.check_alive()
        await super().accept(operation)


async def test_operation_that_crashes_immediately_is_recorded_after_the_first_crash() -> None:
    """An operation that is repeated after a crash is recorded before it runs, so that its crashes are counted."""
    journal, store = _SlowJournal(), StrictStore()
    service = journal.process = await start(journal, store, trainer=PoisonedTrainer(POISON))
    adapter_id = await create(service, 'culprit')
    await _crash_during(service, _poison(1, adapter_id))
    assert await journal.entries(adapter_id, after=0) == []
    journal.was_killed = True
    service = journal.process = await start(journal, store, trainer=PoisonedTrainer(POISON))
    await _crash_during(service, _poison(1, adapter_id))
    service = await _serve_after_crashes(journal, store)
    assert (await service.execute(_poison(1, adapter_id))).reason == OperationCrashed.reason


@pytest.mark.parametrize('is_culprit_first', [False, True])
async def test_work_sent_with_a_crashing_verb_is_not_blamed(*, is_culprit_first: bool) -> None:
    """A save that is sent together with a load that always crashes succeeds; only the load fails."""
    journal, store = MemoryJournal(), StrictStore()
    service = await start(journal, store)
    culprit, innocent = await create(service, 'culprit'), await create(service, 'innocent')
    await service.execute(journals.operation(1, culprit, save=operation_pb2.Save(name='known')))
    load = replace(journals.step_operation(2, culprit), verb=Load(checkpoint_path=next(iter(store.checkpoints))))
    save = journals.operation(1, innocent, save=operation_pb2.Save(name='beside'))
    operations = [load, save] if is_culprit_first else [save, load]
    await service.journal.close()
    for _ in range(MAX_ATTEMPTS):
        service = await start(journal, store, trainer=PoisonedTrainer(method='import_state'))
        await _crash_during(service, *operations)
        journal.was_killed = True
    service = await start(journal, store, trainer=PoisonedTrainer(method='import_state'))
    outcomes = dict(zip(('load', 'save'), await asyncio.gather(*map(service.execute, (load, save))), strict=True))
    assert outcomes['load'].reason == OperationCrashed.reason
    assert isinstance(outcomes['save'], OperationResult)
