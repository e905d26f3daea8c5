"""Adapters of ended sessions are parked: they are saved once, removed from memory and restored unchanged."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from fixtures import journals
from fixtures.crashing import ALICE, Died, StrictStore, create, start
from fixtures.model_verbs import let_others_run
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle_services.checkpoint.domain.errors import CheckpointExists
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import AdapterNotFound, Cancelled, InternalOnly, ServiceUnreachable
from twinkle_services.model.application.create_adapter import CreateAdapterRequest
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.domain.errors import ReplicaLeased
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.domain.training_config import TrainingConfig

PREFIX = 'session-expired'


class RefusingStore(StrictStore):
    """A store that refuses a name in use, as the checkpoint service does."""

    async def save(self, adapter_id, state, *, base_model, save, request_id):
        """Save a state, or raise CheckpointExists."""
        known = self.checkpoints.get(f'twinkle://{adapter_id}/weights/{save.name}')
        if known is not None and known[0] != request_id:
            raise CheckpointExists(f'{adapter_id}/weights/{save.name}')
        return await super().save(adapter_id, state, base_model=base_model, save=save, request_id=request_id)


@pytest.fixture
def journal() -> MemoryJournal:
    """Journal that outlives the service."""
    return MemoryJournal()


@pytest.fixture
def store() -> StrictStore:
    """Store that outlives the service."""
    return RefusingStore()


async def _trained(service, request_id='r1', *, steps=1):
    adapter_id = await create(service, request_id)
    for number in range(steps):
        await service.execute(journals.batch_operation(2 * number + 1, adapter_id, seed=number))
        await service.execute(journals.step_operation(2 * number + 2, adapter_id))
    return adapter_id


def _park(service, adapter_id, prefix=PREFIX):
    return service.verbs.park_adapter(ALICE, adapter_id, save_prefix=prefix)


async def test_parking_saves_unsaved_steps_and_frees_the_memory(journal, store):
    """Parking saves a checkpoint with the optimizer and step count, and frees the engine's memory."""
    service = await start(journal, store)
    adapter_id = await _trained(service, steps=2)
    weights = service.trainer.adapters[adapter_id].weights.tobytes()
    parked = await _park(service, adapter_id)
    path = f'twinkle://{adapter_id}/weights/{PREFIX}-2'
    assert parked.checkpoint_path == path
    assert list(store.checkpoints) == [path]
    assert store.checkpoints[path][1].trainer
    assert not service.trainer.adapters
    assert not service.verbs.is_resident(adapter_id)
    result = await service.execute(journals.batch_operation(5, adapter_id))
    assert not result.is_replayed
    assert service.trainer.adapters[adapter_id].weights.tobytes() == weights


async def test_parked_adapter_continues_bitwise(journal, store):
    """A parked adapter continues bitwise, even with a pending gradient or a pending Forward."""
    service, reference = await start(journal, store), await start(MemoryJournal(), StrictStore())
    adapter_id, reference_id = await create(service), await create(reference)
    script = [
        lambda number, name: journals.batch_operation(number, name, seed=number),
        journals.step_operation,
        lambda number, name: journals.batch_operation(number, name, seed=number),
        journals.forward_operation,
        lambda number, name: journals.operation(number, name, backward={}),
        journals.step_operation,
    ]
    for number, verb in enumerate(script, start=1):
        await _park(service, adapter_id)
        result, expected = (
            await service.execute(verb(number, adapter_id)),
            await reference.execute(verb(number, reference_id)),
        )
        assert isinstance(result, OperationResult)
        assert getattr(result.outcome, 'loss', None) == getattr(expected.outcome, 'loss', None)
    assert (
        service.trainer.adapters[adapter_id].weights.tobytes()
        == reference.trainer.adapters[reference_id].weights.tobytes()
    )


async def test_a_saved_adapter_is_not_saved_again(journal, store):
    """Saved, untrained and loaded adapters are not saved again; after a step or an undo, an adapter is saved."""
    service = await start(journal, store)
    adapter_id = await create(service)
    assert (await _park(service, adapter_id)).checkpoint_path == ''
    await service.execute(journals.batch_operation(1, adapter_id))
    await service.execute(journals.step_operation(2, adapter_id))
    save = wire.Save(name='mine', is_optimizer_included=True)
    await service.execute(journals.operation(3, adapter_id, save=save))
    saved_path = f'twinkle://{adapter_id}/weights/mine'
    assert (await _park(service, adapter_id)).checkpoint_path == saved_path
    await service.execute(journals.batch_operation(4, adapter_id))
    assert (await _park(service, adapter_id)).checkpoint_path == saved_path
    await service.execute(journals.step_operation(5, adapter_id))
    assert (await _park(service, adapter_id)).checkpoint_path.endswith(f'{PREFIX}-2')
    await service.execute(journals.operation(6, adapter_id, load=wire.Load(checkpoint_path=saved_path)))
    assert (await _park(service, adapter_id)).checkpoint_path == saved_path
    await service.execute(journals.operation(7, adapter_id, undo=wire.Undo(step_count=1)))
    assert (await _park(service, adapter_id)).checkpoint_path.endswith(f'{PREFIX}-1')


@pytest.mark.parametrize(
    'save',
    [wire.Save(name='weights'), wire.Save(name='brief', is_optimizer_included=True, ttl={'seconds': 60})],
    ids=['without optimizer', 'with expiry'],
)
async def test_incomplete_or_expiring_save_does_not_count(journal, store, save):
    """A checkpoint without the optimizer, or with an expiry time, does not count as saved."""
    service = await start(journal, store)
    adapter_id = await _trained(service)
    await service.execute(journals.operation(3, adapter_id, save=save))
    assert (await _park(service, adapter_id)).checkpoint_path.endswith(f'{PREFIX}-1')


async def test_another_state_of_the_same_step_has_another_name(journal, store):
    """Another state of the same step, which an undo allows, is saved with another name."""
    service = await start(journal, store)
    adapter_id = await _trained(service)
    first = (await _park(service, adapter_id)).checkpoint_path
    before = store.checkpoints[first]
    await service.execute(journals.operation(3, adapter_id, undo=wire.Undo(step_count=1)))
    await service.execute(journals.batch_operation(4, adapter_id, seed=9))
    await service.execute(journals.step_operation(5, adapter_id))
    assert (await _park(service, adapter_id)).checkpoint_path == f'{first}-5'
    assert store.checkpoints[first] == before


async def test_adapter_with_a_running_operation_is_not_parked(journal, store):
    """An adapter with a running operation is not parked; the next attempt parks it."""
    service = await start(journal, store)
    adapter_id = await _trained(service)
    service.trainer.gate.clear()
    running = asyncio.ensure_future(service.execute(journals.batch_operation(3, adapter_id)))
    await let_others_run()
    await _park(service, adapter_id)
    assert service.verbs.is_resident(adapter_id)
    assert not store.checkpoints
    service.trainer.gate.set()
    assert isinstance(await running, OperationResult)
    await _park(service, adapter_id)
    assert not service.verbs.is_resident(adapter_id)
    assert len(store.checkpoints) == 1


@pytest.mark.parametrize('resident_adapters', [2, 1], ids=['for a pass', 'for memory'])
async def test_waiting_operations_are_cancelled(journal, store, resident_adapters):
    """Parking cancels operations that wait for a pass or for memory, and later ones, and frees their numbers."""
    service = await start(journal, store, resident_adapters=resident_adapters)
    adapter_id, other_id = await _trained(service), await create(service, 'other')
    service.trainer.gate.clear()
    running = asyncio.ensure_future(service.execute(journals.batch_operation(1, other_id)))
    await let_others_run()
    waiting = [
        asyncio.ensure_future(service.execute(journals.batch_operation(number, adapter_id))) for number in (3, 4)
    ]
    await let_others_run()
    parking = asyncio.ensure_future(_park(service, adapter_id))
    assert [type(error) for error in await asyncio.gather(*waiting)] == [Cancelled, Cancelled]
    service.trainer.gate.set()
    await parking
    assert isinstance(await running, OperationResult)
    assert isinstance(await service.execute(journals.batch_operation(3, adapter_id)), OperationResult)


async def test_operation_during_a_save_stays_unsaved(journal, store):
    """If an operation arrives during the save, the step of this operation still counts as unsaved."""
    service = await start(journal, store)
    adapter_id = await _trained(service)
    gate, reached, save = asyncio.Event(), asyncio.Event(), store.save

    async def slow(*args, **kwargs):
        reached.set()
        await gate.wait()
        return await save(*args, **kwargs)

    store.save = slow
    parking = asyncio.ensure_future(_park(service, adapter_id))
    await reached.wait()
    await service.execute(journals.batch_operation(3, adapter_id))
    result = await service.execute(journals.step_operation(4, adapter_id))
    assert result.outcome.step_count == 2
    gate.set()
    await parking
    assert [path.rpartition('-')[2] for path in store.checkpoints] == ['1']
    assert service.verbs.directory.find(adapter_id).is_unsaved
    assert (await _park(service, adapter_id)).checkpoint_path.endswith(f'{PREFIX}-2')


@pytest.mark.parametrize('is_saved_by_client', [False, True])
async def test_a_saved_adapter_is_not_saved_again_after_a_restart(journal, store, is_saved_by_client):
    """A saved adapter is not saved again after a restart, even if its last outcome is only found by replay."""
    service = await start(journal, store)
    adapter_id = await _trained(service)
    if is_saved_by_client:
        save = wire.Save(name='mine', is_optimizer_included=True)
        await service.execute(journals.operation(3, adapter_id, save=save))
    path = (await _park(service, adapter_id)).checkpoint_path
    number = service.verbs.directory.find(adapter_id).sequence_number + 1
    await journal.accept(journals.batch_operation(number, adapter_id))
    service = await start(journal, store)
    assert service.verbs.directory.find(adapter_id).sequence_number == number
    assert (await _park(service, adapter_id)).checkpoint_path == path
    assert list(store.checkpoints) == [path]


async def test_concurrent_parking_saves_once(journal, store):
    """Two concurrent calls save the adapter once."""
    service = await start(journal, store)
    adapter_id = await _trained(service)
    saves, save = [], store.save

    async def count(*args, **kwargs):
        saves.append(kwargs['request_id'])
        await asyncio.sleep(0)
        return await save(*args, **kwargs)

    store.save = count
    first, second = await asyncio.gather(*(_park(service, adapter_id) for _ in range(2)))
    assert first.checkpoint_path == second.checkpoint_path
    assert len(saves) == 1


async def test_a_failed_save_does_not_park_the_adapter(journal, store):
    """If saving fails, the adapter stays in memory; the next attempt saves it."""
    service = await start(journal, store)
    adapter_id = await _trained(service)
    save = store.save

    async def unavailable(*_args, **_kwargs):
        raise ServiceUnreachable('checkpoint')

    store.save = unavailable
    with pytest.raises(ServiceUnreachable):
        await _park(service, adapter_id)
    assert service.verbs.is_resident(adapter_id)
    store.save = save
    assert (await _park(service, adapter_id)).checkpoint_path


async def test_an_evicted_adapter_is_saved(journal, store):
    """An idle adapter that was already evicted is still saved."""
    service = await start(journal, store, resident_adapters=2)
    first, second, third = [await _trained(service, f'r{index}') for index in range(3)]
    assert not service.verbs.is_resident(first)
    assert (await _park(service, first)).checkpoint_path
    assert not service.verbs.is_resident(first)
    assert {second, third} >= set(service.trainer.adapters)


async def test_full_parameter_adapter_is_parked_without_a_checkpoint(journal, store):
    """A full-parameter adapter is parked unsaved; other adapters are saved only after its lease has ended."""
    service = await start(journal, store, is_lease_allowed=True)
    trained, fresh = await _trained(service), await create(service, 'r2')
    for adapter_id in (trained, fresh):
        await _park(service, adapter_id, '')
    full = CreateAdapterRequest(
        request_id='full', base_model='tiny', lora_config=None, training_config=TrainingConfig(), full_parameters=()
    )
    leaseholder = await service.verbs.create_adapter(ALICE, full)
    with pytest.raises(ReplicaLeased):
        await _park(service, trained)
    await _park(service, fresh)
    await service.execute(journals.batch_operation(1, leaseholder.adapter_id))
    await service.execute(journals.step_operation(2, leaseholder.adapter_id))
    parked = await _park(service, leaseholder.adapter_id)
    assert (parked.has_lease, parked.checkpoint_path) == (False, '')
    assert not service.trainer.adapters
    assert (await _park(service, trained)).checkpoint_path


async def test_only_services_can_park_adapters(journal, store):
    """A client cannot park adapters, and another tenant's adapter is not found."""
    service = await start(journal, store)
    adapter_id = await _trained(service)
    with pytest.raises(InternalOnly):
        await service.verbs.park_adapter(replace(ALICE, is_internal=False, scopes=frozenset({'train'})), adapter_id)
    with pytest.raises(AdapterNotFound):
        await service.verbs.park_adapter(Caller(tenant_id='bob', is_internal=True), adapter_id)
    assert service.verbs.is_resident(adapter_id)


@pytest.mark.parametrize('is_forward_first', [False, True], ids=['after a step', 'while a Forward waits'])
async def test_a_crash_while_parking_does_not_change_the_weights(is_forward_first):
    """A crash at any moment of training, parking and loading does not change the final weights."""
    weights, moments = set(), 1
    crash = 0
    while crash <= moments:
        crash += 1
        journal, store = MemoryJournal(), RefusingStore()
        service = await _run_with_crash(journal, store, is_forward_first=is_forward_first, crash=crash)
        moments = max(moments, service.journal.moments)
        assert [path.rpartition('-')[2] for path in store.checkpoints] == ['1', '2']
        (known,) = await journal.adapters()
        async with service.verbs.cleanup._residency.hold(known.adapter.adapter_id):  # noqa: SLF001 - as other tests do
            weights.add(service.trainer.adapters[known.adapter.adapter_id].weights.tobytes())
    assert crash > 20
    assert len(weights) == 1


async def _run_with_crash(journal, store, *, is_forward_first, crash):
    """Run the operations with one crash; return the restarted service."""
    for moment_limit in (crash, float('inf')):
        with suppress(Died):
            service = await start(journal, store, moment_limit=moment_limit)
            await _run_operations(service, is_forward_first=is_forward_first)
            return service
    raise AssertionError('the service crashed twice')


async def _run_operations(service, *, is_forward_first):
    adapter_id = await create(service)
    await service.execute(journals.batch_operation(1, adapter_id, seed=1))
    await service.execute(journals.step_operation(2, adapter_id))
    if is_forward_first:
        await service.execute(journals.forward_operation(3, adapter_id, seed=2))
    else:
        await service.execute(journals.batch_operation(3, adapter_id, seed=2))
    if not _has_continued(service, adapter_id):
        await _park(service, adapter_id)
        await _park(service, adapter_id)
    if is_forward_first:
        await service.execute(journals.operation(4, adapter_id, backward={}))
    else:
        await service.execute(journals.batch_operation(4, adapter_id, seed=3))
    await service.execute(journals.step_operation(5, adapter_id))
    await _park(service, adapter_id)
    await service.execute(journals.operation(6, adapter_id, zero_grad={}))


def _has_continued(service, adapter_id):
    return service.verbs.directory.find(adapter_id).sequence_number > 3
