"""Leases: a full-parameter adapter uses its replica exclusively, and operations do not wait for the end of a lease."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from fixtures.fake_trainer import FakeTrainer
from fixtures.model_verbs import FakePorts, create_request, execute, let_others_run, training
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import BaseModelNotFound, Cancelled, InvalidField, ScopeMissing
from twinkle_services.model.application.resident import ResidencyBounds
from twinkle_services.model.application.service import ModelService
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import AdapterDescription
from twinkle_services.model.domain.errors import FullParametersDisabled, ReplicaInUse, ReplicaLeased
from twinkle_services.model.domain.operation import Load, Save, Step, ZeroGrad
from twinkle_services.model.domain.result import SaveResult

ALICE = Caller(tenant_id='alice', scopes=frozenset({'train'}))
BOB = Caller(tenant_id='bob', scopes=frozenset({'train', 'full_parameters'}))
OPERATOR = Caller(tenant_id='ops', scopes=frozenset({'operator'}))
LORA = create_request('lora')
FULL = create_request('full', full_parameters=())
IDLE_SECONDS = 600.0


@pytest.fixture
def ports() -> FakePorts:
    """Fake ports that outlive the service."""
    return FakePorts()


def leasing(ports: FakePorts) -> ModelService:
    """Return a service that allows leases."""
    return ports.verbs(residency=ResidencyBounds(is_lease_allowed=True, idle_seconds=IDLE_SECONDS))


async def park(verbs: ModelService, adapter: Adapter) -> Adapter:
    """Park an adapter as the gateway does when its session expires."""
    caller = Caller(tenant_id=adapter.tenant_id, is_internal=True)
    return await verbs.park_adapter(caller, adapter.adapter_id, save_prefix='session-expired')


async def test_leases_are_disabled_by_default(ports: FakePorts) -> None:
    """A lease needs the operator's permission and the scope `full_parameters`."""
    with pytest.raises(FullParametersDisabled):
        await ports.verbs().create_adapter(BOB, FULL)
    with pytest.raises(ScopeMissing):
        await leasing(ports).create_adapter(ALICE, FULL)
    assert not ports.trainer.adapters


async def test_lease_is_refused_while_other_adapters_are_in_memory(ports: FakePorts) -> None:
    """A lease is refused while another adapter is in memory; during a lease, that adapter is refused immediately."""
    verbs = leasing(ports)
    lora = await verbs.create_adapter(ALICE, LORA)
    await execute(verbs, lora, 1, ZeroGrad())
    with pytest.raises(ReplicaInUse):
        await verbs.create_adapter(BOB, FULL)
    await execute(verbs, lora, 2, ZeroGrad())
    await park(verbs, lora)
    full = await verbs.create_adapter(BOB, FULL)
    for _ in range(2):
        with pytest.raises(ReplicaLeased):
            await execute(verbs, lora, 3, ZeroGrad())
    await verbs.delete_adapter(BOB, full.adapter_id)
    await execute(verbs, lora, 3, ZeroGrad())
    assert list(ports.trainer.adapters) == [lora.adapter_id]
    await verbs.close()


@pytest.mark.parametrize('release', ['end of the session', 'time'])
async def test_lease_is_refused_while_an_evicted_adapter_is_likely_to_be_used(ports: FakePorts, release: str) -> None:
    """An evicted adapter prevents leases until its session ends, or for an hour after its last operation."""
    verbs = leasing(ports)
    lora = await verbs.create_adapter(ALICE, LORA)
    await execute(verbs, lora, 1, ZeroGrad())
    await park(verbs, lora)
    ports.clock.advance(timedelta(seconds=1))
    await execute(verbs, lora, 2, ZeroGrad())
    ports.clock.advance(timedelta(seconds=IDLE_SECONDS + 1))
    await verbs.cleanup()
    assert not ports.trainer.adapters
    with pytest.raises(ReplicaInUse):
        await verbs.create_adapter(BOB, FULL)
    if release == 'time':
        ports.clock.advance(timedelta(hours=1))
    else:
        await park(verbs, lora)
    full = await verbs.create_adapter(BOB, FULL)
    await execute(verbs, full, 1, ZeroGrad())
    await verbs.close()


async def test_full_parameter_runs_take_turns_when_idle(ports: FakePorts) -> None:
    """A run whose lease ended because it was idle allows another run's lease, and can lease the replica again later."""
    verbs = leasing(ports)
    first = await verbs.create_adapter(BOB, FULL)
    for number in (1, 2):
        ports.clock.advance(timedelta(seconds=IDLE_SECONDS + 1))
        await verbs.cleanup()
        other = await verbs.create_adapter(BOB, replace(FULL, request_id=f'other {number}'))
        with pytest.raises(ReplicaLeased):
            await execute(verbs, first, number, ZeroGrad())
        await verbs.delete_adapter(BOB, other.adapter_id)
        await execute(verbs, first, number, ZeroGrad())
    await verbs.close()


async def test_no_adapter_is_created_during_a_lease(ports: FakePorts) -> None:
    """No other adapter can be created while the replica is leased."""
    verbs = leasing(ports)
    full = await verbs.create_adapter(BOB, FULL)
    for request in (LORA, replace(FULL, request_id='another')):
        with pytest.raises(ReplicaLeased):
            await verbs.create_adapter(BOB, request)
    await verbs.delete_adapter(BOB, full.adapter_id)
    await verbs.create_adapter(ALICE, LORA)
    await verbs.close()


async def test_failed_creation_leaves_no_lease(ports: FakePorts) -> None:
    """If the engine refuses a full-parameter adapter, the replica is not leased."""
    verbs = leasing(ports)

    async def refuse(*_args: object, **_options: object) -> AdapterDescription:
        raise ReplicaLeased()

    create, ports.trainer.create_adapter = ports.trainer.create_adapter, refuse
    with pytest.raises(ReplicaLeased):
        await verbs.create_adapter(BOB, FULL)
    ports.trainer.create_adapter = create
    await verbs.create_adapter(ALICE, LORA)
    await verbs.close()


async def test_lease_holds_after_a_restart(ports: FakePorts) -> None:
    """A lease still excludes other adapters after a restart, and its holder continues."""
    verbs = leasing(ports)
    await park(verbs, await verbs.create_adapter(ALICE, replace(LORA, request_id='before')))
    full = await verbs.create_adapter(BOB, FULL)
    await execute(verbs, full, 1, ZeroGrad())
    await verbs.close()
    ports.trainer = FakeTrainer()
    again = leasing(ports)
    await again.recover()
    with pytest.raises(ReplicaLeased):
        await again.create_adapter(ALICE, LORA)
    await execute(again, full, 2, ZeroGrad())
    await again.close()


async def test_ended_lease_is_not_renewed_by_a_restart(ports: FakePorts) -> None:
    """A restart does not renew a lease that has ended, or one that the operator no longer allows."""
    verbs = leasing(ports)
    full = await verbs.create_adapter(BOB, FULL)
    await park(verbs, full)
    await verbs.close()
    again = leasing(ports)
    await again.recover()
    lora = await again.create_adapter(ALICE, LORA)
    await again.delete_adapter(ALICE, lora.adapter_id)
    await execute(again, full, 1, ZeroGrad())
    await again.close()
    ports.trainer = FakeTrainer()
    disabled = ports.verbs()
    await disabled.recover()
    await disabled.create_adapter(ALICE, replace(LORA, request_id='next'))
    with pytest.raises(FullParametersDisabled):
        await execute(disabled, full, 2, ZeroGrad())
    await disabled.close()


async def test_lease_of_a_busy_run_ends_with_its_session(ports: FakePorts) -> None:
    """When a session ends, its running operation completes, its waiting ones are cancelled, and its run can resume."""
    verbs, reference = leasing(ports), FakePorts()
    full = await verbs.create_adapter(BOB, FULL)
    ports.trainer.gate.clear()
    running = asyncio.ensure_future(execute(verbs, full, 1, training()))
    waiting = asyncio.ensure_future(execute(verbs, full, 2, Step()))
    await let_others_run()
    parking = asyncio.ensure_future(park(verbs, full))
    await let_others_run()
    ports.trainer.gate.set()
    await running
    with pytest.raises(Cancelled):
        await waiting
    assert not (await parking).has_lease
    assert not ports.trainer.adapters
    lora = await verbs.create_adapter(ALICE, LORA)
    with pytest.raises(ReplicaInUse):
        await execute(verbs, full, 2, Step())
    await verbs.delete_adapter(ALICE, lora.adapter_id)
    await execute(verbs, full, 2, Step())
    expected = leasing(reference)
    undisturbed = await expected.create_adapter(BOB, FULL)
    await execute(expected, undisturbed, 1, training())
    await execute(expected, undisturbed, 2, Step())
    weights = reference.trainer.adapters[undisturbed.adapter_id].weights
    assert ports.trainer.adapters[full.adapter_id].weights.tobytes() == weights.tobytes()
    await verbs.close()


async def test_operator_ends_a_lease(ports: FakePorts) -> None:
    """Any operator can end a lease; the run cannot lease the replica again for `IDLE_SECONDS`."""
    verbs = leasing(ports)
    full = await verbs.create_adapter(BOB, FULL)
    with pytest.raises(ScopeMissing):
        await verbs.end_lease(BOB, full.base_model)
    with pytest.raises(BaseModelNotFound):
        await verbs.end_lease(OPERATOR, 'unknown')
    assert await verbs.end_lease(OPERATOR, full.base_model) == full.adapter_id
    assert await verbs.end_lease(OPERATOR, full.base_model) is None
    with pytest.raises(ReplicaInUse):
        await execute(verbs, full, 1, ZeroGrad())
    lora = await verbs.create_adapter(ALICE, LORA)
    await verbs.delete_adapter(ALICE, lora.adapter_id)
    ports.clock.advance(timedelta(seconds=IDLE_SECONDS))
    await execute(verbs, full, 1, ZeroGrad())
    await verbs.close()


async def test_idle_lease_ends(ports: FakePorts) -> None:
    """The lease of an idle run ends after `IDLE_SECONDS`, even if the service was restarted."""
    verbs = leasing(ports)
    full = await verbs.create_adapter(BOB, FULL)
    await verbs.close()
    ports.trainer = FakeTrainer()
    again = leasing(ports)
    await again.recover()
    ports.clock.advance(timedelta(seconds=IDLE_SECONDS))
    await again.cleanup()
    assert not again.is_resident(full.adapter_id)
    await again.create_adapter(ALICE, LORA)
    await again.close()


async def test_resumed_run_needs_the_scope(ports: FakePorts) -> None:
    """A key without the scope cannot execute operations of a full-parameter run of its tenant."""
    verbs = leasing(ports)
    full = await verbs.create_adapter(BOB, FULL)
    await park(verbs, full)
    with pytest.raises(ScopeMissing):
        await execute(verbs, full, 1, ZeroGrad(), caller=replace(BOB, scopes=frozenset({'train'})))
    assert not ports.trainer.adapters
    await verbs.close()


async def test_checkpoints_of_the_other_kind_are_refused(ports: FakePorts) -> None:
    """A full-parameter run refuses checkpoints of adapters, and an adapter refuses those of full-parameter runs."""
    verbs = leasing(ports)
    full = await verbs.create_adapter(BOB, FULL)
    saved = (await execute(verbs, full, 1, Save(name='x'))).outcome
    assert isinstance(saved, SaveResult)
    whole = saved.checkpoint_path
    state = ports.store.checkpoints[whole]
    assert state.full_parameters is not None
    ports.store.checkpoints['adapter'] = replace(state, full_parameters=None)
    await execute(verbs, full, 2, Load(checkpoint_path=whole))
    with pytest.raises(InvalidField):
        await execute(verbs, full, 3, Load(checkpoint_path='adapter'))
    await verbs.delete_adapter(BOB, full.adapter_id)
    with pytest.raises(InvalidField):
        await verbs.create_adapter(BOB, replace(FULL, request_id='adapter', checkpoint_path='adapter'))
    with pytest.raises(InvalidField):
        await verbs.create_adapter(BOB, replace(FULL, request_id='whole', full_parameters=None, checkpoint_path=whole))
    again = await verbs.create_adapter(BOB, replace(FULL, request_id='again', checkpoint_path=whole))
    assert again.has_lease
    await verbs.close()
