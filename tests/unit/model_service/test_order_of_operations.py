"""Operations of an adapter run once and in order, with repeats, gaps, refusals and disconnects."""

import asyncio
import random

import pytest

from fixtures.model_verbs import (
    ALICE,
    BOB,
    Harness,
    create_request,
    let_others_run,
)
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import (
    AdapterNotFound,
    BaseModelNotFound,
    Cancelled,
    DeadlinePassed,
    DigestMismatch,
    Disposition,
    DomainError,
    Draining,
    InternalOnly,
    InvalidField,
    QuotaExceeded,
    RequestIdReused,
    ScopeMissing,
    ServiceUnreachable,
)
from twinkle_services.model.application.create_adapter import AdapterLimits
from twinkle_services.model.domain.errors import LossNotFinite, OperationNotFound, SequenceGap, SequenceReused
from twinkle_services.model.domain.operation import LrStep, PublishVersion, Save, Step, ZeroGrad
from twinkle_services.model.domain.result import PublishResult

GATEWAY = Caller(tenant_id='', is_internal=True)


async def test_operations_received_out_of_order_run_in_order() -> None:
    """Ten operations sent in random order run in the order of their numbers."""
    harness = Harness()
    adapter = await harness.adapter()
    numbers = list(range(1, 11))
    random.Random(3).shuffle(numbers)
    verbs = {number: Step(learning_rate=float(number)) for number in numbers}
    await asyncio.gather(*(harness.execute(adapter, number, verbs[number]) for number in numbers))
    assert [verb for _, verb in harness.trainer.ran] == [verbs[number] for number in sorted(numbers)]


async def test_repeat_returns_the_recorded_outcome() -> None:
    """A repeated operation returns the recorded outcome without running again, and is marked as replayed."""
    harness = Harness()
    adapter = await harness.adapter()
    first = await harness.execute(adapter, 1, Step())
    repeated = await harness.execute(adapter, 1, Step())
    assert harness.executed_verbs() == ['Step']
    assert repeated.outcome == first.outcome
    assert (first.is_replayed, repeated.is_replayed) == (False, True)


async def test_repeat_waits_for_the_running_operation() -> None:
    """Five concurrent copies of one request run once and return one outcome."""
    harness = Harness()
    adapter = await harness.adapter()
    harness.trainer.gate.clear()
    copies = [asyncio.ensure_future(harness.execute(adapter, 1, Step())) for _ in range(5)]
    await let_others_run()
    harness.trainer.gate.set()
    results = await asyncio.gather(*copies)
    assert harness.executed_verbs() == ['Step']
    assert len({id(result.outcome) for result in results}) == 1


async def test_changed_repeat_is_refused() -> None:
    """A number that was used for an operation with other content is refused."""
    harness = Harness()
    adapter = await harness.adapter()
    await harness.execute(adapter, 1, Step())
    with pytest.raises(SequenceReused):
        await harness.execute(adapter, 1, ZeroGrad())


async def test_a_lasting_gap_is_an_error() -> None:
    """An operation whose predecessor never arrives fails, and the error names the missing number."""
    harness = Harness(gap_seconds=0.01)
    adapter = await harness.adapter()
    with pytest.raises(SequenceGap) as caught:
        await harness.execute(adapter, 3, Step())
    assert caught.value.expected == 1


@pytest.mark.parametrize('error', [InvalidField('x', 'is bad'), ServiceUnreachable('checkpoint')])
async def test_refused_operation_leaves_its_number_free(error: DomainError) -> None:
    """The number of an operation that was refused, or that may be retried, can be used with other content."""
    harness = Harness()
    adapter = await harness.adapter()
    harness.trainer.failures.append(error)
    with pytest.raises(type(error)):
        await harness.execute(adapter, 1, Step())
    assert harness.directory.get(ALICE, adapter.adapter_id).sequence_number == 0
    await harness.execute(adapter, 1, ZeroGrad())
    assert harness.executed_verbs() == ['ZeroGrad']


async def test_failed_operation_uses_its_number() -> None:
    """A repeated failed operation fails in the same way without running again, and the next number runs."""
    harness = Harness()
    adapter = await harness.adapter()
    harness.trainer.failures.append(LossNotFinite(adapter.adapter_id, 0))
    for _ in range(2):
        with pytest.raises(LossNotFinite):
            await harness.execute(adapter, 1, Step())
    assert harness.directory.get(ALICE, adapter.adapter_id).sequence_number == 1
    await harness.execute(adapter, 2, Step())
    assert harness.executed_verbs() == ['Step']
    assert harness.directory.get(ALICE, adapter.adapter_id).sequence_number == 2


@pytest.mark.parametrize(
    ('error', 'disposition'),
    [
        (InvalidField('x', 'is bad'), Disposition.REFUSED),
        (Cancelled(), Disposition.REFUSED),
        (ServiceUnreachable('checkpoint'), Disposition.RETRYABLE),
        (Draining(), Disposition.RETRYABLE),
        (LossNotFinite('ad-1', 0), Disposition.FAILED),
        (DigestMismatch('a', 'b'), Disposition.FAILED),
        (DeadlinePassed(), Disposition.FAILED),
    ],
)
async def test_disposition_states_whether_the_number_is_used(error: DomainError, disposition: Disposition) -> None:
    """The disposition of a failed operation states whether its number is used, for any kind of error."""
    harness = Harness()
    adapter = await harness.adapter()
    harness.trainer.failures.append(error)
    with pytest.raises(type(error)) as caught:
        await harness.execute(adapter, 1, Step())
    assert caught.value.disposition is disposition
    is_used = harness.directory.get(ALICE, adapter.adapter_id).sequence_number == 1
    assert is_used is not disposition.frees_number


async def test_a_disconnected_caller_does_not_stop_a_running_operation() -> None:
    """A running operation completes after its caller disconnects, and its outcome is recorded for a retry."""
    harness = Harness()
    adapter = await harness.adapter()
    harness.trainer.gate.clear()
    disconnected = asyncio.ensure_future(harness.execute(adapter, 1, Step()))
    await let_others_run()
    disconnected.cancel()
    harness.trainer.gate.set()
    assert (await harness.execute(adapter, 1, Step())).is_replayed
    assert harness.executed_verbs() == ['Step']


async def test_a_defect_is_recorded_and_does_not_block_the_queue() -> None:
    """The queue continues after a defect, and the failed operation does not run again."""
    harness = Harness()
    adapter = await harness.adapter()
    harness.trainer.failures.append(RuntimeError('defect'))
    with pytest.raises(RuntimeError):
        await harness.execute(adapter, 1, Step())
    await harness.execute(adapter, 2, Step())
    assert harness.executed_verbs() == ['Step']


async def test_old_number_no_longer_on_record_is_not_found() -> None:
    """The error for a number that is no longer on record is "not found", and its operation does not run again."""
    harness = Harness()
    adapter = await harness.adapter()
    for number in range(1, 101):
        await harness.execute(adapter, number, LrStep())
    with pytest.raises(OperationNotFound):
        await harness.execute(adapter, 1, LrStep())
    assert len(harness.trainer.ran) == 100


async def test_foreign_adapter_is_not_found() -> None:
    """Another tenant's adapter and an unknown id raise the same error."""
    harness = Harness()
    adapter = await harness.adapter()
    with pytest.raises(AdapterNotFound) as foreign:
        await harness.execute(adapter, 1, Step(), caller=BOB)
    with pytest.raises(AdapterNotFound) as absent:
        harness.directory.get(BOB, 'ad-none')
    assert str(foreign.value).replace(adapter.adapter_id, 'ad-none') == str(absent.value)
    with pytest.raises(AdapterNotFound):
        await harness.delete(BOB, adapter.adapter_id)


async def test_publish_counts_versions_and_retries_with_the_same_number() -> None:
    """A failed publish is retried with the same version number."""
    harness = Harness()
    adapter = await harness.adapter()
    await harness.execute(adapter, 1, PublishVersion())
    harness.store.failures.append(ServiceUnreachable('checkpoint'))
    with pytest.raises(ServiceUnreachable):
        await harness.execute(adapter, 2, PublishVersion())
    result = await harness.execute(adapter, 2, PublishVersion())
    assert isinstance(result.outcome, PublishResult)
    assert result.outcome.version == 2
    assert harness.directory.get(ALICE, adapter.adapter_id).version == 2


async def test_adapter_from_a_checkpoint_continues_its_step_count() -> None:
    """An adapter created from a checkpoint with its optimizer continues its step count."""
    harness = Harness()
    adapter = await harness.adapter()
    await harness.execute(adapter, 1, Step())
    await harness.execute(adapter, 2, Save(name='a', is_optimizer_included=True))
    path = f'twinkle://{adapter.adapter_id}/weights/a'
    successor = await harness.create(ALICE, create_request('r2', checkpoint_path=path, is_optimizer_included=True))
    assert successor.step_count == 1


async def test_create_is_idempotent_by_request_id() -> None:
    """A repeated request returns the same adapter, other content with its id is refused, and tenants are separate."""
    harness = Harness()
    adapter = await harness.adapter()
    assert (await harness.adapter()).adapter_id == adapter.adapter_id
    assert (await harness.adapter(BOB)).adapter_id != adapter.adapter_id
    with pytest.raises(RequestIdReused):
        await harness.create(ALICE, create_request('r1', fingerprint='other'))


async def test_repeat_returns_its_adapter_at_the_limit() -> None:
    """New requests are refused at the gateway's adapter limit, and repeated requests still return their adapter."""
    harness = Harness()
    adapter = await harness.adapter()
    repeated = await harness.create(ALICE, create_request('r1', adapters_limit=1))
    assert repeated.adapter_id == adapter.adapter_id
    with pytest.raises(QuotaExceeded) as refused:
        await harness.create(ALICE, create_request('r2', adapters_limit=1))
    assert (refused.value.quota, refused.value.limit) == ('max_adapters', 1)
    assert (await harness.create(ALICE, create_request('r2'))).adapter_id != adapter.adapter_id


async def test_create_refuses_before_the_engine_is_called() -> None:
    """An unknown model and an adapter beyond the total limit are refused before the engine is called."""
    harness = Harness(adapters=AdapterLimits(tenant=10, total=0))
    with pytest.raises(BaseModelNotFound):
        await harness.create(ALICE, create_request('r1', base_model='other'))
    with pytest.raises(QuotaExceeded):
        await harness.create(ALICE, create_request('r1'))
    assert not harness.trainer.adapters


async def test_limit_of_a_tenant_does_not_affect_others() -> None:
    """A tenant at its limit cannot create adapters until it deletes one; other tenants can create adapters."""
    harness = Harness(adapters=AdapterLimits(tenant=1, total=10))
    adapter = await harness.adapter()
    with pytest.raises(QuotaExceeded) as refused:
        await harness.create(ALICE, create_request('r2'))
    assert refused.value.limit == 1
    await harness.adapter(BOB)
    await harness.delete(ALICE, adapter.adapter_id)
    await harness.create(ALICE, create_request('r2'))


async def test_watch_sends_a_snapshot_then_changes_and_resumes() -> None:
    """A watch sends a snapshot and then changes; a resumed watch continues after its token."""
    harness = Harness()
    adapter = await harness.adapter()
    watch = harness.directory.watch(GATEWAY, '')
    snapshot = [await anext(watch), await anext(watch)]
    assert [event.is_synced for event in snapshot] == [False, True]
    await harness.execute(adapter, 1, Step())
    change = await anext(watch)
    assert change.adapter is not None
    assert change.adapter.step_count == 1
    await watch.aclose()
    await harness.delete(ALICE, adapter.adapter_id)
    resumed = harness.directory.watch(GATEWAY, change.token)
    assert (await anext(resumed)).deleted_id == adapter.adapter_id
    await resumed.aclose()


async def test_slow_watcher_gets_a_new_snapshot() -> None:
    """A watcher whose token is older than the stored events gets a new snapshot."""
    harness = Harness()
    adapter = await harness.adapter()
    watch = harness.directory.watch(GATEWAY, '')
    await anext(watch)
    token = (await anext(watch)).token
    await watch.aclose()
    for number in range(1, 2001):
        harness.directory.update(adapter.adapter_id, step_count=number)
    resumed = harness.directory.watch(GATEWAY, token)
    first = await anext(resumed)
    assert first.adapter is not None
    assert first.adapter.step_count == 2000
    assert (await anext(resumed)).is_synced
    await resumed.aclose()


async def test_watch_is_for_services_and_ends_with_the_service() -> None:
    """A client cannot watch adapters, and a watching service does not delay the shutdown."""
    harness = Harness()
    with pytest.raises(InternalOnly):
        await anext(harness.directory.watch(ALICE, ''))
    watch = harness.directory.watch(GATEWAY, '')
    assert (await anext(watch)).is_synced
    waiting = asyncio.ensure_future(anext(watch))
    await let_others_run()
    harness.directory.close()
    with pytest.raises(Draining):
        await waiting


async def test_training_needs_its_scope() -> None:
    """Creating and training adapters require the scope `train`."""
    harness = Harness()
    adapter = await harness.adapter()
    sampling_only = Caller(tenant_id='alice', scopes=frozenset({'sample'}))
    with pytest.raises(ScopeMissing):
        await harness.create(sampling_only, create_request('r2'))
    with pytest.raises(ScopeMissing):
        await harness.execute(adapter, 1, Step(), caller=sampling_only)
