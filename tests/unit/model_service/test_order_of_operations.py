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
from services.model.application.create_adapter import AdapterCounts
from services.model.domain.adapter import Adapter
from services.model.domain.errors import LossNotFinite, OperationNotFound, SequenceGap, SequenceReused
from services.model.domain.operation import LrStep, PublishVersion, Save, Step, Verb, ZeroGrad
from services.model.domain.result import OperationResult, PublishResult

GATEWAY = Caller(tenant_id='', is_internal=True)


class World(FakeWorld):
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

    def ran(self) -> list[str]:
        """Names of the verbs that ran."""
        return [type(verb).__name__ for _, verb in self.trainer.ran]


async def test_operations_that_come_out_of_order_run_in_order() -> None:
    """Ten operations sent in any order run by their numbers."""
    world = World()
    adapter = await world.adapter()
    numbers = list(range(1, 11))
    random.Random(3).shuffle(numbers)
    verbs = {number: Step(learning_rate=float(number)) for number in numbers}
    await asyncio.gather(*(world.do(adapter, number, verbs[number]) for number in numbers))
    assert [verb for _, verb in world.trainer.ran] == [verbs[number] for number in sorted(numbers)]


async def test_repeat_is_answered_from_the_record() -> None:
    """The same operation again runs nothing and says that it was recorded."""
    world = World()
    adapter = await world.adapter()
    first = await world.do(adapter, 1, Step())
    again = await world.do(adapter, 1, Step())
    assert world.ran() == ['Step']
    assert again.outcome == first.outcome
    assert (first.is_replayed, again.is_replayed) == (False, True)


async def test_repeat_while_running_waits_for_the_one_run() -> None:
    """Two copies of one request at the same time run once."""
    world = World()
    adapter = await world.adapter()
    world.trainer.gate.clear()
    copies = [asyncio.ensure_future(world.do(adapter, 1, Step())) for _ in range(5)]
    await let_others_run()
    world.trainer.gate.set()
    results = await asyncio.gather(*copies)
    assert world.ran() == ['Step']
    assert len({id(result.outcome) for result in results}) == 1


async def test_changed_repeat_is_aborted() -> None:
    """A number stands for one content for ever."""
    world = World()
    adapter = await world.adapter()
    await world.do(adapter, 1, Step())
    with pytest.raises(SequenceReused):
        await world.do(adapter, 1, ZeroGrad())


async def test_gap_that_stays_is_told() -> None:
    """An operation whose predecessor never comes fails and names it."""
    world = World(gap_seconds=0.01)
    adapter = await world.adapter()
    with pytest.raises(SequenceGap) as caught:
        await world.do(adapter, 3, Step())
    assert caught.value.expected == 1


@pytest.mark.parametrize('error', [InvalidField('x', 'is bad'), ServiceUnreachable('checkpoint')])
async def test_refused_operation_leaves_its_number_free(error: DomainError) -> None:
    """After a refusal the same number may carry corrected content."""
    world = World()
    adapter = await world.adapter()
    world.trainer.failures.append(error)
    with pytest.raises(type(error)):
        await world.do(adapter, 1, Step())
    assert world.directory.get(ALICE, adapter.adapter_id).sequence_number == 0
    await world.do(adapter, 1, ZeroGrad())
    assert world.ran() == ['ZeroGrad']


async def test_failed_operation_uses_its_number_up() -> None:
    """A repeat of what failed fails the same way without running again; the next number runs."""
    world = World()
    adapter = await world.adapter()
    world.trainer.failures.append(LossNotFinite(adapter.adapter_id, 0))
    for _ in range(2):
        with pytest.raises(LossNotFinite):
            await world.do(adapter, 1, Step())
    assert world.directory.get(ALICE, adapter.adapter_id).sequence_number == 1
    await world.do(adapter, 2, Step())
    assert world.ran() == ['Step']
    assert world.directory.get(ALICE, adapter.adapter_id).sequence_number == 2


async def test_caller_that_leaves_does_not_stop_what_runs() -> None:
    """The outcome is on record for the retry."""
    world = World()
    adapter = await world.adapter()
    world.trainer.gate.clear()
    leaving = asyncio.ensure_future(world.do(adapter, 1, Step()))
    await let_others_run()
    leaving.cancel()
    world.trainer.gate.set()
    assert (await world.do(adapter, 1, Step())).is_replayed
    assert world.ran() == ['Step']


async def test_unforeseen_failure_is_on_record_and_blocks_nobody() -> None:
    """After a defect the queue goes on."""
    world = World()
    adapter = await world.adapter()
    world.trainer.failures.append(RuntimeError('defect'))
    with pytest.raises(RuntimeError):
        await world.do(adapter, 1, Step())
    await world.do(adapter, 2, Step())
    assert world.ran() == ['Step']


async def test_old_number_no_longer_on_record_is_not_found() -> None:
    """The record is bounded; what fell out of it is told so and never run again."""
    world = World()
    adapter = await world.adapter()
    for number in range(1, 101):
        await world.do(adapter, number, LrStep())
    with pytest.raises(OperationNotFound):
        await world.do(adapter, 1, LrStep())
    assert len(world.trainer.ran) == 100


async def test_foreign_adapter_is_as_absent_as_none() -> None:
    """Another tenant's id and a made-up one raise the same, word for word but for the id."""
    world = World()
    adapter = await world.adapter()
    with pytest.raises(AdapterNotFound) as foreign:
        await world.do(adapter, 1, Step(), caller=BOB)
    with pytest.raises(AdapterNotFound) as absent:
        world.directory.get(BOB, 'ad-none')
    assert str(foreign.value).replace(adapter.adapter_id, 'ad-none') == str(absent.value)
    with pytest.raises(AdapterNotFound):
        await world.delete(BOB, adapter.adapter_id)


async def test_publish_counts_versions_and_retries_with_the_same_one() -> None:
    """A publish that failed on the way is tried again as the same version."""
    world = World()
    adapter = await world.adapter()
    await world.do(adapter, 1, PublishVersion())
    world.store.failures.append(ServiceUnreachable('checkpoint'))
    with pytest.raises(ServiceUnreachable):
        await world.do(adapter, 2, PublishVersion())
    result = await world.do(adapter, 2, PublishVersion())
    assert isinstance(result.outcome, PublishResult)
    assert result.outcome.version == 2
    assert world.directory.get(ALICE, adapter.adapter_id).version == 2


async def test_adapter_begins_from_a_checkpoint_with_its_steps() -> None:
    """Counters come along with the optimizer."""
    world = World()
    adapter = await world.adapter()
    await world.do(adapter, 1, Step())
    await world.do(adapter, 2, Save(name='a', is_optimizer_included=True))
    path = f'twinkle://{adapter.adapter_id}/weights/a'
    heir = await world.create(ALICE, create_command('r2', checkpoint_path=path, is_optimizer_included=True))
    assert heir.step_count == 1


async def test_create_is_idempotent_by_request_id() -> None:
    """The same request gives the same adapter, other content under its id is refused, tenants do not mix."""
    world = World()
    adapter = await world.adapter()
    assert (await world.adapter()).adapter_id == adapter.adapter_id
    assert (await world.adapter(BOB)).adapter_id != adapter.adapter_id
    with pytest.raises(RequestIdReused):
        await world.create(ALICE, create_command('r1', fingerprint='other'))


async def test_a_repeat_finds_its_adapter_though_the_tenant_may_have_no_other_one() -> None:
    """The gateway says that the tenant has as many as it may: what is new is refused, and what was made is found."""
    world = World()
    adapter = await world.adapter()
    repeated = await world.create(ALICE, create_command('r1', adapters_limit=1))
    assert repeated.adapter_id == adapter.adapter_id
    with pytest.raises(QuotaExceeded) as refused:
        await world.create(ALICE, create_command('r2', adapters_limit=1))
    assert (refused.value.quota, refused.value.limit) == ('max_adapters', 1)
    assert (await world.create(ALICE, create_command('r2'))).adapter_id != adapter.adapter_id


async def test_create_refuses_before_anything_is_made() -> None:
    """Unknown model, a rank too high, one adapter too many: none of them reaches the engine."""
    world = World(adapters=AdapterCounts(tenant=10, total=0))
    with pytest.raises(BaseModelNotFound):
        await world.create(ALICE, create_command('r1', base_model='other'))
    with pytest.raises(QuotaExceeded):
        await world.create(ALICE, create_command('r1'))
    assert not world.trainer.adapters


async def test_a_tenant_at_its_own_limit_leaves_the_others_theirs() -> None:
    """Its next adapter is refused until it deletes one; another tenant's is made."""
    world = World(adapters=AdapterCounts(tenant=1, total=10))
    adapter = await world.adapter()
    with pytest.raises(QuotaExceeded) as refused:
        await world.create(ALICE, create_command('r2'))
    assert refused.value.limit == 1
    await world.adapter(BOB)
    await world.delete(ALICE, adapter.adapter_id)
    await world.create(ALICE, create_command('r2'))


async def test_deleted_adapter_is_gone_for_operations_that_wait() -> None:
    """What waits behind a running operation finds the adapter absent."""
    world = World()
    adapter = await world.adapter()
    world.trainer.gate.clear()
    running = asyncio.ensure_future(world.do(adapter, 1, Step()))
    waiting = asyncio.ensure_future(world.do(adapter, 2, Step()))
    behind_a_gap = asyncio.ensure_future(world.do(adapter, 9, Step()))
    await let_others_run()
    deleting = asyncio.ensure_future(world.delete(ALICE, adapter.adapter_id))
    await let_others_run()
    world.trainer.gate.set()
    await asyncio.gather(running, deleting)
    for orphan in (waiting, behind_a_gap):
        with pytest.raises(AdapterNotFound):
            await orphan


async def test_deleted_adapter_is_gone_for_what_waits_for_the_engine() -> None:
    """Behind another adapter's pass it ends at once, without being run, and nothing of it is left in the journal."""
    world = World()
    busy, adapter = await world.adapter(), await world.adapter(request_id='r2')
    world.trainer.gate.clear()
    running = asyncio.ensure_future(world.do(busy, 1, Step()))
    await let_others_run()
    waiting = asyncio.ensure_future(world.do(adapter, 1, Step()))
    behind = asyncio.ensure_future(world.do(adapter, 2, Step()))
    await let_others_run()
    # The gate stays shut: whoever waited for the engine here would wait for ever.
    await world.delete(ALICE, adapter.adapter_id)
    for orphan in (waiting, behind):
        with pytest.raises(AdapterNotFound):
            await orphan
    world.trainer.gate.set()
    await running
    assert [ran_id for ran_id, _ in world.trainer.ran] == [busy.adapter_id]


async def test_watch_gives_snapshot_then_changes_and_resumes() -> None:
    """A watcher that comes back with its token misses nothing and sees nothing twice."""
    world = World()
    adapter = await world.adapter()
    watch = world.directory.watch(GATEWAY, '')
    snapshot = [await anext(watch), await anext(watch)]
    assert [event.is_synced for event in snapshot] == [False, True]
    await world.do(adapter, 1, Step())
    change = await anext(watch)
    assert change.adapter is not None
    assert change.adapter.step_count == 1
    await watch.aclose()
    await world.delete(ALICE, adapter.adapter_id)
    resumed = world.directory.watch(GATEWAY, change.token)
    assert (await anext(resumed)).deleted_id == adapter.adapter_id
    await resumed.aclose()


async def test_watcher_that_fell_behind_gets_a_new_snapshot() -> None:
    """The ring of events is bounded; a token older than it begins anew."""
    world = World()
    adapter = await world.adapter()
    watch = world.directory.watch(GATEWAY, '')
    await anext(watch)
    token = (await anext(watch)).token
    await watch.aclose()
    for number in range(1, 2001):
        world.directory.update(adapter.adapter_id, step_count=number)
    late = world.directory.watch(GATEWAY, token)
    first = await anext(late)
    assert first.adapter is not None
    assert first.adapter.step_count == 2000
    assert (await anext(late)).is_synced
    await late.aclose()


async def test_watch_is_for_services_and_ends_with_the_service() -> None:
    """A client may not follow every tenant's adapters; a service that follows does not hold up the end."""
    world = World()
    with pytest.raises(ScopeMissing):
        await anext(world.directory.watch(ALICE, ''))
    watch = world.directory.watch(GATEWAY, '')
    assert (await anext(watch)).is_synced
    waiting = asyncio.ensure_future(anext(watch))
    await let_others_run()
    world.directory.close()
    with pytest.raises(Draining):
        await waiting


async def test_a_key_without_the_scope_trains_nothing() -> None:
    """The service checks again what the gateway has checked."""
    world = World()
    adapter = await world.adapter()
    sampling_only = Caller(tenant_id='alice', scopes=frozenset({'sample'}))
    with pytest.raises(ScopeMissing):
        await world.create(sampling_only, create_command('r2'))
    with pytest.raises(ScopeMissing):
        await world.do(adapter, 1, Step(), caller=sampling_only)
