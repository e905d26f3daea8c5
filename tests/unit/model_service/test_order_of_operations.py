"""Operations of an adapter run in order, once; repeats, gaps, refusals and lost callers are told right."""

import asyncio
import random

import pytest

from fixtures.model_verbs import (
    ALICE,
    BOB,
    FakeWorld,
    create_command,
    execute,
    let_others_run,
)
from services.kit.caller import Caller
from services.kit.errors import (
    AdapterNotFound,
    BaseModelNotFound,
    DomainError,
    Draining,
    InvalidField,
    QuotaExceeded,
    RequestIdReused,
    ScopeMissing,
    ServiceUnreachable,
)
from services.model.application.create_adapter import AdapterLimits
from services.model.domain.adapter import Adapter
from services.model.domain.errors import LossNotFinite, OperationNotFound, SequenceGap, SequenceReused
from services.model.domain.operation import LrStep, PublishVersion, Save, Step, Verb, ZeroGrad
from services.model.domain.result import OperationResult, PublishResult

GATEWAY = Caller(tenant_id='', is_internal=True)


class Ports(FakeWorld):
    """The verbs over fakes."""

    def __init__(self, **limits: object) -> None:
        super().__init__()
        self.all = self.verbs(**limits)
        self.directory, self.create, self.delete = self.all.directory, self.all.create_adapter, self.all.delete_adapter

    async def adapter(self, caller: Caller = ALICE, request_id: str = 'r1') -> Adapter:
        """Create an adapter."""
        return await self.create(caller, create_command(request_id))

    async def do(self, adapter: Adapter, number: int, verb: Verb, *, caller: Caller | None = None) -> OperationResult:
        """Carry out an operation, refused where the queue is full."""
        return await execute(self.all, adapter, number, verb, caller=caller)

    def count_operation(self) -> list[str]:
        """Names of the verbs that ran."""
        return [type(verb).__name__ for _, verb in self.trainer.ran]


async def test_operations_that_come_out_of_order_run_in_order() -> None:
    """Ten operations sent in any order run by their numbers."""
    ports = Ports()
    adapter = await ports.adapter()
    numbers = list(range(1, 11))
    random.Random(3).shuffle(numbers)
    verbs = {number: Step(learning_rate=float(number)) for number in numbers}
    await asyncio.gather(*(ports.do(adapter, number, verbs[number]) for number in numbers))
    assert [verb for _, verb in ports.trainer.ran] == [verbs[number] for number in sorted(numbers)]


async def test_repeat_is_answered_from_the_record() -> None:
    """The same operation again runs nothing and says that it was recorded."""
    ports = Ports()
    adapter = await ports.adapter()
    first = await ports.do(adapter, 1, Step())
    again = await ports.do(adapter, 1, Step())
    assert ports.count_operation() == ['Step']
    assert again.outcome == first.outcome
    assert (first.is_replayed, again.is_replayed) == (False, True)


async def test_repeat_while_running_waits_for_the_one_run() -> None:
    """Two copies of one request at the same time run once."""
    ports = Ports()
    adapter = await ports.adapter()
    ports.trainer.gate.clear()
    copies = [asyncio.ensure_future(ports.do(adapter, 1, Step())) for _ in range(5)]
    await let_others_run()
    ports.trainer.gate.set()
    results = await asyncio.gather(*copies)
    assert ports.count_operation() == ['Step']
    assert len({id(result.outcome) for result in results}) == 1


async def test_changed_repeat_is_aborted() -> None:
    """A number stands for one content for ever."""
    ports = Ports()
    adapter = await ports.adapter()
    await ports.do(adapter, 1, Step())
    with pytest.raises(SequenceReused):
        await ports.do(adapter, 1, ZeroGrad())


async def test_gap_that_stays_is_told() -> None:
    """An operation whose predecessor never comes fails and names it."""
    ports = Ports(gap_seconds=0.01)
    adapter = await ports.adapter()
    with pytest.raises(SequenceGap) as caught:
        await ports.do(adapter, 3, Step())
    assert caught.value.expected == 1


@pytest.mark.parametrize('error', [InvalidField('x', 'is bad'), ServiceUnreachable('checkpoint')])
async def test_refused_operation_leaves_its_number_free(error: DomainError) -> None:
    """After a refusal the same number may carry corrected content."""
    ports = Ports()
    adapter = await ports.adapter()
    ports.trainer.failures.append(error)
    with pytest.raises(type(error)):
        await ports.do(adapter, 1, Step())
    assert ports.directory.get(ALICE, adapter.adapter_id).sequence_number == 0
    await ports.do(adapter, 1, ZeroGrad())
    assert ports.count_operation() == ['ZeroGrad']


async def test_failed_operation_uses_its_number_up() -> None:
    """A repeat of what failed fails the same way without running again; the next number runs."""
    ports = Ports()
    adapter = await ports.adapter()
    ports.trainer.failures.append(LossNotFinite(adapter.adapter_id, 0))
    for _ in range(2):
        with pytest.raises(LossNotFinite):
            await ports.do(adapter, 1, Step())
    assert ports.directory.get(ALICE, adapter.adapter_id).sequence_number == 1
    await ports.do(adapter, 2, Step())
    assert ports.count_operation() == ['Step']
    assert ports.directory.get(ALICE, adapter.adapter_id).sequence_number == 2


async def test_caller_that_leaves_does_not_stop_what_runs() -> None:
    """The outcome is on record for the retry."""
    ports = Ports()
    adapter = await ports.adapter()
    ports.trainer.gate.clear()
    leaving = asyncio.ensure_future(ports.do(adapter, 1, Step()))
    await let_others_run()
    leaving.cancel()
    ports.trainer.gate.set()
    assert (await ports.do(adapter, 1, Step())).is_replayed
    assert ports.count_operation() == ['Step']


async def test_unforeseen_failure_is_on_record_and_blocks_nobody() -> None:
    """After a defect the queue goes on."""
    ports = Ports()
    adapter = await ports.adapter()
    ports.trainer.failures.append(RuntimeError('defect'))
    with pytest.raises(RuntimeError):
        await ports.do(adapter, 1, Step())
    await ports.do(adapter, 2, Step())
    assert ports.count_operation() == ['Step']


async def test_old_number_no_longer_on_record_is_not_found() -> None:
    """The record is bounded; what fell out of it is told so and never run again."""
    ports = Ports()
    adapter = await ports.adapter()
    for number in range(1, 101):
        await ports.do(adapter, number, LrStep())
    with pytest.raises(OperationNotFound):
        await ports.do(adapter, 1, LrStep())
    assert len(ports.trainer.ran) == 100


async def test_foreign_adapter_is_as_absent_as_none() -> None:
    """Another tenant's id and a made-up one raise the same, word for word but for the id."""
    ports = Ports()
    adapter = await ports.adapter()
    with pytest.raises(AdapterNotFound) as foreign:
        await ports.do(adapter, 1, Step(), caller=BOB)
    with pytest.raises(AdapterNotFound) as absent:
        ports.directory.get(BOB, 'ad-none')
    assert str(foreign.value).replace(adapter.adapter_id, 'ad-none') == str(absent.value)
    with pytest.raises(AdapterNotFound):
        await ports.delete(BOB, adapter.adapter_id)


async def test_publish_counts_versions_and_retries_with_the_same_one() -> None:
    """A publish that failed on the way is tried again as the same version."""
    ports = Ports()
    adapter = await ports.adapter()
    await ports.do(adapter, 1, PublishVersion())
    ports.store.failures.append(ServiceUnreachable('checkpoint'))
    with pytest.raises(ServiceUnreachable):
        await ports.do(adapter, 2, PublishVersion())
    result = await ports.do(adapter, 2, PublishVersion())
    assert isinstance(result.outcome, PublishResult)
    assert result.outcome.version == 2
    assert ports.directory.get(ALICE, adapter.adapter_id).version == 2


async def test_adapter_begins_from_a_checkpoint_with_its_steps() -> None:
    """Counters come along with the optimizer."""
    ports = Ports()
    adapter = await ports.adapter()
    await ports.do(adapter, 1, Step())
    await ports.do(adapter, 2, Save(name='a', is_optimizer_included=True))
    path = f'twinkle://{adapter.adapter_id}/weights/a'
    heir = await ports.create(ALICE, create_command('r2', checkpoint_path=path, is_optimizer_included=True))
    assert heir.step_count == 1


async def test_create_is_idempotent_by_request_id() -> None:
    """The same request gives the same adapter, other content under its id is refused, tenants do not mix."""
    ports = Ports()
    adapter = await ports.adapter()
    assert (await ports.adapter()).adapter_id == adapter.adapter_id
    assert (await ports.adapter(BOB)).adapter_id != adapter.adapter_id
    with pytest.raises(RequestIdReused):
        await ports.create(ALICE, create_command('r1', fingerprint='other'))


async def test_a_repeat_finds_its_adapter_though_the_tenant_may_have_no_other_one() -> None:
    """The gateway says that the tenant has as many as it may: what is new is refused, and what was made is found."""
    ports = Ports()
    adapter = await ports.adapter()
    repeated = await ports.create(ALICE, create_command('r1', adapters_limit=1))
    assert repeated.adapter_id == adapter.adapter_id
    with pytest.raises(QuotaExceeded) as refused:
        await ports.create(ALICE, create_command('r2', adapters_limit=1))
    assert (refused.value.quota, refused.value.limit) == ('max_adapters', 1)
    assert (await ports.create(ALICE, create_command('r2'))).adapter_id != adapter.adapter_id


async def test_create_refuses_before_anything_is_made() -> None:
    """Unknown model, a rank too high, one adapter too many: none of them reaches the engine."""
    ports = Ports(adapters=AdapterLimits(tenant=10, total=0))
    with pytest.raises(BaseModelNotFound):
        await ports.create(ALICE, create_command('r1', base_model='other'))
    with pytest.raises(QuotaExceeded):
        await ports.create(ALICE, create_command('r1'))
    assert not ports.trainer.adapters


async def test_a_tenant_at_its_own_limit_leaves_the_others_theirs() -> None:
    """Its next adapter is refused until it deletes one; another tenant's is made."""
    ports = Ports(adapters=AdapterLimits(tenant=1, total=10))
    adapter = await ports.adapter()
    with pytest.raises(QuotaExceeded) as refused:
        await ports.create(ALICE, create_command('r2'))
    assert refused.value.limit == 1
    await ports.adapter(BOB)
    await ports.delete(ALICE, adapter.adapter_id)
    await ports.create(ALICE, create_command('r2'))


async def test_deleted_adapter_is_gone_for_operations_that_wait() -> None:
    """What waits behind a running operation finds the adapter absent."""
    ports = Ports()
    adapter = await ports.adapter()
    ports.trainer.gate.clear()
    running = asyncio.ensure_future(ports.do(adapter, 1, Step()))
    waiting = asyncio.ensure_future(ports.do(adapter, 2, Step()))
    behind_a_gap = asyncio.ensure_future(ports.do(adapter, 9, Step()))
    await let_others_run()
    deleting = asyncio.ensure_future(ports.delete(ALICE, adapter.adapter_id))
    await let_others_run()
    ports.trainer.gate.set()
    await asyncio.gather(running, deleting)
    for orphan in (waiting, behind_a_gap):
        with pytest.raises(AdapterNotFound):
            await orphan


async def test_deleted_adapter_is_gone_for_what_waits_for_the_engine() -> None:
    """Behind another adapter's pass it ends at once, without being run, and nothing of it is left in the journal."""
    ports = Ports()
    busy, adapter = await ports.adapter(), await ports.adapter(request_id='r2')
    ports.trainer.gate.clear()
    running = asyncio.ensure_future(ports.do(busy, 1, Step()))
    await let_others_run()
    waiting = asyncio.ensure_future(ports.do(adapter, 1, Step()))
    behind = asyncio.ensure_future(ports.do(adapter, 2, Step()))
    await let_others_run()
    # The gate stays shut: whoever waited for the engine here would wait for ever.
    await ports.delete(ALICE, adapter.adapter_id)
    for orphan in (waiting, behind):
        with pytest.raises(AdapterNotFound):
            await orphan
    ports.trainer.gate.set()
    await running
    assert [ran_id for ran_id, _ in ports.trainer.ran] == [busy.adapter_id]


async def test_watch_gives_snapshot_then_changes_and_resumes() -> None:
    """A watcher that comes back with its token misses nothing and sees nothing twice."""
    ports = Ports()
    adapter = await ports.adapter()
    watch = ports.directory.watch(GATEWAY, '')
    snapshot = [await anext(watch), await anext(watch)]
    assert [event.is_synced for event in snapshot] == [False, True]
    await ports.do(adapter, 1, Step())
    change = await anext(watch)
    assert change.adapter is not None
    assert change.adapter.step_count == 1
    await watch.aclose()
    await ports.delete(ALICE, adapter.adapter_id)
    resumed = ports.directory.watch(GATEWAY, change.token)
    assert (await anext(resumed)).deleted_id == adapter.adapter_id
    await resumed.aclose()


async def test_watcher_that_fell_behind_gets_a_new_snapshot() -> None:
    """The ring of events is bounded; a token older than it begins anew."""
    ports = Ports()
    adapter = await ports.adapter()
    watch = ports.directory.watch(GATEWAY, '')
    await anext(watch)
    token = (await anext(watch)).token
    await watch.aclose()
    for number in range(1, 2001):
        ports.directory.update(adapter.adapter_id, step_count=number)
    late = ports.directory.watch(GATEWAY, token)
    first = await anext(late)
    assert first.adapter is not None
    assert first.adapter.step_count == 2000
    assert (await anext(late)).is_synced
    await late.aclose()


async def test_watch_is_for_services_and_ends_with_the_service() -> None:
    """A client may not follow every tenant's adapters; a service that follows does not hold up the end."""
    ports = Ports()
    with pytest.raises(ScopeMissing):
        await anext(ports.directory.watch(ALICE, ''))
    watch = ports.directory.watch(GATEWAY, '')
    assert (await anext(watch)).is_synced
    waiting = asyncio.ensure_future(anext(watch))
    await let_others_run()
    ports.directory.close()
    with pytest.raises(Draining):
        await waiting


async def test_a_key_without_the_scope_trains_nothing() -> None:
    """The service checks again what the gateway has checked."""
    ports = Ports()
    adapter = await ports.adapter()
    sampling_only = Caller(tenant_id='alice', scopes=frozenset({'sample'}))
    with pytest.raises(ScopeMissing):
        await ports.create(sampling_only, create_command('r2'))
    with pytest.raises(ScopeMissing):
        await ports.do(adapter, 1, Step(), caller=sampling_only)
