"""Adapters that have been unused for long are saved and removed. A failure or a crash loses no training."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from fixtures import journals
from fixtures.crashing import ALICE, Died, PoisonedTrainer, StrictStore, start
from fixtures.model_verbs import let_others_run
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import AdapterExpired, AdapterNotFound, ServiceUnreachable
from twinkle_services.kit.rpc.context import current_caller_or_none
from twinkle_services.model.application.attempts import MAX_ATTEMPTS
from twinkle_services.model.application.create_adapter import CreateAdapterRequest
from twinkle_services.model.assembly import make_limits, start_job
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.config import ModelConfig
from twinkle_services.model.domain.adapter import MAX_EXPIRED, ExpiredAdapter
from twinkle_services.model.domain.training_config import TrainingConfig

LIMIT = timedelta(days=90)
PREFIX = 'adapter-expired'


class OwnedStore(StrictStore):
    """A store that records the tenant of each save; a test can block its saves or make them fail."""

    def __init__(self) -> None:
        super().__init__()
        self.tenants: set[str] = set()
        self.failures: list[ServiceUnreachable] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def save(self, adapter_id, state, *, base_model, save, request_id):
        """Save a state for the current caller."""
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop()
        caller = current_caller_or_none()
        self.tenants |= {caller.tenant_id} if caller else set()
        return await super().save(adapter_id, state, base_model=base_model, save=save, request_id=request_id)


@pytest.fixture
def journal() -> MemoryJournal:
    """Journal that outlives the service."""
    return MemoryJournal()


@pytest.fixture
def store() -> OwnedStore:
    """Store that outlives the service."""
    return OwnedStore()


@pytest.fixture
def clock() -> FakeClock:
    """Clock that outlives the service."""
    return FakeClock()


async def _start(journal, store, clock, **options):
    return await start(journal, store, clock=clock, **{'unused_for': LIMIT, **options})


async def _create(service, request_id='r1', *, session_id='ses-1', **fields):
    request = CreateAdapterRequest(
        request_id=request_id,
        base_model='tiny',
        lora_config=None,
        training_config=TrainingConfig(),
        session_id=session_id,
        fingerprint=request_id,
        **fields,
    )
    return (await service.verbs.create_adapter(ALICE, request)).adapter_id


async def _trained(service, request_id='r1', *, number=1, **fields):
    adapter_id = await _create(service, request_id, **fields)
    await service.execute(journals.batch_operation(number, adapter_id))
    await service.execute(journals.step_operation(number + 1, adapter_id))
    return adapter_id


async def _end_session(service, adapter_id):
    """Park the adapter without saving it, as the gateway does when a session ends with success."""
    await service.verbs.park_adapter(ALICE, adapter_id)


async def test_unsaved_training_is_saved_before_an_unused_adapter_is_removed(journal, store, clock):
    """An adapter is removed once it has been unused for longer than the limit; its tenant owns the checkpoint."""
    service = await _start(journal, store, clock)
    adapter_id = await _trained(service)
    weights = service.trainer.adapters[adapter_id].weights.tobytes()
    clock.advance(timedelta(days=5))
    await _end_session(service, adapter_id)
    clock.advance(LIMIT)
    assert await service.verbs.expiry() == 0
    clock.advance(timedelta(seconds=1))
    assert await service.verbs.expiry() == 1
    path = f'twinkle://{adapter_id}/weights/{PREFIX}-1'
    assert (list(store.checkpoints), store.tenants) == ([path], {'alice'})
    (tensor,) = store.checkpoints[path][1].adapter.values()
    assert bytes(tensor.data) == weights
    assert not service.trainer.adapters
    assert await journal.adapters() == []
    loaded_id = await _create(service, 'r2', checkpoint_path=path, is_optimizer_included=True)
    assert service.trainer.adapters[loaded_id].weights.tobytes() == weights


@pytest.mark.parametrize('is_restarted', [False, True])
async def test_later_requests_name_the_setting_and_the_checkpoint(journal, store, clock, is_restarted):
    """The error for a removed adapter names its checkpoint and the setting; another tenant does not find it."""
    service = await _start(journal, store, clock)
    adapter_id = await _trained(service)
    await _end_session(service, adapter_id)
    clock.advance(2 * LIMIT)
    await service.verbs.expiry()
    if is_restarted:
        service = await _start(journal, store, clock)
    error = await service.execute(journals.batch_operation(3, adapter_id))
    assert isinstance(error, AdapterExpired)
    assert error.metadata() == {
        'adapterId': adapter_id,
        'checkpointPath': f'twinkle://{adapter_id}/weights/{PREFIX}-1',
        'setting': 'parked_adapter_days',
    }
    assert error.setting in ModelConfig.model_fields
    for repeated in (_create(service), service.verbs.delete_adapter(ALICE, adapter_id)):
        with pytest.raises(AdapterExpired):
            await repeated
    with pytest.raises(AdapterNotFound):
        service.verbs.directory.get(Caller(tenant_id='bob', is_internal=True), adapter_id)
    assert service.verbs.directory.count_of('alice') == 0


async def test_untrained_adapter_is_removed_without_a_checkpoint(journal, store, clock):
    """An adapter without a step is removed, and the error names no checkpoint."""
    service = await _start(journal, store, clock)
    adapter_id = await _create(service)
    await service.execute(journals.batch_operation(1, adapter_id))
    await _end_session(service, adapter_id)
    clock.advance(2 * LIMIT)
    assert await service.verbs.expiry() == 1
    with pytest.raises(AdapterExpired) as refusal:
        service.verbs.directory.get(ALICE, adapter_id)
    assert refusal.value.checkpoint_path == ''
    assert store.checkpoints == {}


async def test_only_unused_adapters_of_ended_sessions_are_removed(journal, store, clock):
    """The last use is the last operation or the end of the session; a session that has not ended keeps its adapters."""
    service = await _start(journal, store, clock, is_lease_allowed=True)
    active = await _trained(service, 'active')
    alone = await _trained(service, 'alone', session_id='')
    ended_late, used_late = await _trained(service, 'late'), await _trained(service, 'used')
    await _end_session(service, used_late)
    clock.advance(LIMIT)
    await _end_session(service, ended_late)
    await service.execute(journals.batch_operation(3, used_late))
    clock.advance(timedelta(days=1))
    assert await service.verbs.expiry() == 1
    remaining = {adapter.adapter_id for adapter in service.verbs.directory.all()}
    assert remaining == {active, ended_late, used_late}
    assert list(store.checkpoints) == [f'twinkle://{alone}/weights/{PREFIX}-1']
    clock.advance(LIMIT)
    service = await _start(journal, store, clock)
    assert await service.verbs.expiry() == 2
    assert [adapter.adapter_id for adapter in service.verbs.directory.all()] == [active]


async def test_full_parameter_run_is_never_removed(journal, store, clock):
    """A full-parameter run is kept, because the service does not save such runs automatically."""
    service = await _start(journal, store, clock, is_lease_allowed=True)
    adapter_id = await _trained(service, session_id='', full_parameters=())
    await _end_session(service, adapter_id)
    clock.advance(2 * LIMIT)
    assert await service.verbs.expiry() == 0
    assert service.verbs.directory.find(adapter_id).last_use_time < clock.now() - LIMIT


@pytest.mark.parametrize(('settings', 'limit'), [({}, LIMIT), ({'parked_adapter_days': 0}, None)])
def test_setting_is_a_number_of_days(settings, limit):
    """The default is 90 days, zero means no limit, and the error for an invalid number names the setting."""
    required = {'base_model': 'tiny', 'checkpoint_address': 'localhost:1'}
    assert make_limits(ModelConfig(**required, **settings)).unused_for == limit
    for wrong in (-1, 0.5, 36_501):
        with pytest.raises(ValidationError) as refusal:
            ModelConfig(**required, parked_adapter_days=wrong)
        assert [error['loc'] for error in refusal.value.errors()] == [('parked_adapter_days',)]


async def test_no_limit_keeps_all_adapters(journal, store, clock):
    """No adapter is removed if there is no limit."""
    service = await _start(journal, store, clock, unused_for=None)
    adapter_id = await _trained(service)
    await _end_session(service, adapter_id)
    clock.advance(100 * LIMIT)
    assert await service.verbs.expiry() == 0


@pytest.mark.parametrize('is_deleted', [False, True])
async def test_a_deleted_checkpoint_is_saved_again(journal, store, clock, is_deleted):
    """The owner's checkpoint is used while it exists; if it was deleted, the adapter is saved again."""
    service = await _start(journal, store, clock)
    adapter_id = await _trained(service)
    await service.execute(journals.operation(3, adapter_id, save=wire.Save(name='mine', is_optimizer_included=True)))
    await _end_session(service, adapter_id)
    if is_deleted:
        store.checkpoints.clear()
    clock.advance(2 * LIMIT)
    assert await service.verbs.expiry() == 1
    name = f'{PREFIX}-1' if is_deleted else 'mine'
    assert list(store.checkpoints) == [f'twinkle://{adapter_id}/weights/{name}']
    with pytest.raises(AdapterExpired) as refusal:
        service.verbs.directory.get(ALICE, adapter_id)
    assert refusal.value.checkpoint_path == f'twinkle://{adapter_id}/weights/{name}'


async def test_failed_save_keeps_the_adapter_and_is_logged_once(journal, store, clock):
    """If a save fails, its adapter is kept with one warning and others are removed; a later sweep removes it."""
    service = await _start(journal, store, clock)
    adapter_ids = [await _trained(service, f'r{index}') for index in range(2)]
    for adapter_id in adapter_ids:
        await _end_session(service, adapter_id)
    clock.advance(2 * LIMIT)
    store.failures = [ServiceUnreachable('checkpoint')]
    with capture_logs() as logs:
        assert await service.verbs.expiry() == 1
        store.failures = [ServiceUnreachable('checkpoint')]
        assert await service.verbs.expiry() == 0
    kept = [line['log_level'] for line in logs if line['event'] == 'unused adapter kept']
    assert kept == ['warning', 'debug']
    assert isinstance(await service.execute(journals.batch_operation(3, adapter_ids[1])), AdapterExpired)
    assert service.verbs.directory.get(ALICE, adapter_ids[0]).is_unsaved
    assert await service.verbs.expiry() == 1


async def test_adapter_that_is_used_during_the_sweep_is_kept(journal, store, clock):
    """An adapter is kept if an operation arrives while the adapter is being saved."""
    service = await _start(journal, store, clock)
    adapter_id = await _trained(service)
    await _end_session(service, adapter_id)
    clock.advance(2 * LIMIT)
    store.gate.clear()
    sweep = asyncio.ensure_future(service.verbs.expiry())
    await let_others_run()
    result = await service.execute(journals.batch_operation(3, adapter_id))
    store.gate.set()
    assert await sweep == 0
    assert result.sequence_number == 3
    assert (await service.execute(journals.step_operation(4, adapter_id))).outcome.step_count == 2


async def test_waiting_operation_keeps_the_adapter(journal, store, clock):
    """An adapter is not removed while one of its operations waits for an earlier operation."""
    service = await _start(journal, store, clock)
    adapter_id = await _trained(service)
    await _end_session(service, adapter_id)
    clock.advance(2 * LIMIT)
    waiting = asyncio.ensure_future(service.execute(journals.batch_operation(4, adapter_id)))
    await let_others_run()
    assert await service.verbs.expiry() == 0
    await service.execute(journals.batch_operation(3, adapter_id))
    assert (await waiting).sequence_number == 4


async def test_other_adapters_do_not_wait_for_a_save(journal, store, clock):
    """Another adapter's operation runs while a sweep waits for the checkpoint service."""
    service = await _start(journal, store, clock)
    other_id, *adapter_ids = [await _trained(service, f'r{index}') for index in range(3)]
    for adapter_id in adapter_ids:
        await _end_session(service, adapter_id)
    clock.advance(LIMIT + timedelta(seconds=1))
    store.gate.clear()
    sweep = asyncio.ensure_future(service.verbs.expiry())
    await let_others_run()
    passes = len(service.trainer.batches)
    result = await service.execute(journals.operation(3, other_id, zero_grad={}))
    assert result.sequence_number == 3
    assert len(service.trainer.batches) == passes + 1
    assert store.checkpoints == {}
    store.gate.set()
    assert await sweep == 2


async def test_sweeps_are_repeated_until_cancelled(journal, store, clock):
    """Unused adapters are removed after each interval, until the sweeps are cancelled."""
    service = await _start(journal, store, clock)
    adapter_ids = [await _trained(service, f'r{index}') for index in range(2)]
    pauses, counts = [], []

    async def pause(seconds):
        pauses.append(seconds)
        counts.append(len(service.verbs.directory))
        if len(pauses) == 3:
            raise asyncio.CancelledError
        await _end_session(service, adapter_ids[len(pauses) - 1])
        clock.advance(2 * LIMIT)

    with pytest.raises(asyncio.CancelledError):
        await service.verbs.expiry.repeat(timedelta(days=1), pause=pause)
    assert (pauses, counts) == ([86400.0] * 3, [2, 1, 0])


async def test_job_that_fails_is_logged():
    """An unexpected error ends a periodic job and is logged immediately; a cancelled job is not reported."""

    async def fail():
        raise RuntimeError('a defect')

    with capture_logs() as logs:
        failed, cancelled = start_job('expiry', fail()), start_job('cleanup', asyncio.Event().wait())
        cancelled.cancel()
        await asyncio.wait([failed, cancelled])
    assert [(line['log_level'], line['job'], str(line['exc_info'])) for line in logs] == [
        ('error', 'expiry', 'a defect')
    ]


async def test_record_of_removed_adapters_is_bounded(journal, store, clock):
    """The directory keeps records of only the newest removed adapters."""
    service = await _start(journal, store, clock)
    for number in range(MAX_EXPIRED + 1):
        service.verbs.directory.expire(ExpiredAdapter(adapter_id=f'x{number}', tenant_id='alice', checkpoint_path=''))
    with pytest.raises(AdapterNotFound):
        service.verbs.directory.get(ALICE, 'x0')
    with pytest.raises(AdapterExpired):
        service.verbs.directory.get(ALICE, 'x1')


@pytest.mark.parametrize('is_settled', [True, False], ids=['with all outcomes', 'with a missing outcome'])
async def test_a_crash_during_a_sweep_loses_nothing(is_settled):
    """A crash at any moment of a sweep loses no training, and the next sweep completes the removal."""
    crash, moments = 0, 1
    while crash <= moments:
        crash += 1
        journal, store, clock = MemoryJournal(), OwnedStore(), FakeClock()
        service = await _start(journal, store, clock)
        adapter_id = await _trained(service)
        weights = service.trainer.adapters[adapter_id].weights.tobytes()
        await _end_session(service, adapter_id)
        await service.journal.close()
        if not is_settled:
            await journal.accept(journals.operation(3, adapter_id, zero_grad={}))
        clock.advance(2 * LIMIT)
        with suppress(Died):
            service = await _start(journal, store, clock, moment_limit=crash)
            await service.verbs.expiry()
        moments = max(moments, service.journal.moments)
        service = await _start(journal, store, clock)
        clock.advance(2 * LIMIT)
        await service.verbs.expiry()
        await service.verbs.close()
        assert len(service.verbs.directory) == 0
        (expired,) = await journal.expired_adapters()
        (tensor,) = store.checkpoints[expired.checkpoint_path][1].adapter.values()
        assert (bytes(tensor.data), len(store.checkpoints)) == (weights, 1)
    assert crash > 10


async def test_adapter_that_crashes_the_service_is_kept(journal, store, clock):
    """An adapter whose save ends the process is kept after `MAX_ATTEMPTS` attempts; other adapters are removed."""
    service = await _start(journal, store, clock)
    poisoned, other = await _trained(service), await _trained(service, 'other')
    await _end_session(service, poisoned)
    await _end_session(service, other)
    await service.journal.close()
    clock.advance(2 * LIMIT)
    for _ in range(MAX_ATTEMPTS):
        service = await _start(journal, store, clock, trainer=PoisonedTrainer(adapter_id=poisoned))
        with pytest.raises(Died):
            await service.verbs.expiry()
    service = await _start(journal, store, clock, trainer=PoisonedTrainer(adapter_id=poisoned))
    assert await service.verbs.expiry() == 1
    assert [adapter.adapter_id for adapter in service.verbs.directory.all()] == [poisoned]


async def test_adapter_that_changed_since_it_was_read_is_not_removed(journal, store, clock):
    """If an adapter changed after it was selected for removal, it is kept; the next sweep removes it."""
    service = await _start(journal, store, clock)
    adapter_id = await _trained(service)
    await _end_session(service, adapter_id)
    clock.advance(2 * LIMIT)
    adapter = service.verbs.directory.find(adapter_id)
    assert not await service.verbs.expiry._delete.expire(replace(adapter, step_count=9))  # noqa: SLF001 - an old value
    assert service.verbs.directory.get(ALICE, adapter_id) == adapter
    assert await service.verbs.expiry() == 1
