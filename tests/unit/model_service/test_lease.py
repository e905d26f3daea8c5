"""The lease of a replica: a full-parameter adapter uses it exclusively until it is deleted."""

import asyncio
from dataclasses import replace

import pytest

from fixtures.fake_estimator import FakeEstimator
from fixtures.fake_trainer import BASE_MODEL, FakeStore, FakeTrainer
from fixtures.journals import CODEC
from services.kit.caller import Caller
from services.kit.clock import FakeClock
from services.kit.errors import NotBuiltYet
from services.model.application.admission import QueueLimits
from services.model.application.create_adapter import AdapterLimits, CreateAdapterRequest
from services.model.application.residency import ResidencyBounds
from services.model.application.service import Limits, ModelService, make_service
from services.model.backends.data_client import NoDataService
from services.model.backends.journal.memory import MemoryJournal
from services.model.domain.errors import ReplicaLeased
from services.model.domain.operation import Operation, Save, Verb, ZeroGrad
from services.model.domain.training_config import TrainingConfig
from services.model.ports import Ports

ALICE = Caller(tenant_id='alice', scopes=frozenset({'train'}))
BOB = Caller(tenant_id='bob', scopes=frozenset({'train'}))
LIMITS = Limits(
    adapters=AdapterLimits(tenant=10, total=10),
    lora_rank=64,
    pass_tokens=1024,
    queue=QueueLimits(operation_count=100, request_bytes=1 << 20),
    gap_seconds=5.0,
    residency=ResidencyBounds(),
)
LORA = CreateAdapterRequest(
    request_id='lora', base_model=BASE_MODEL, lora_config=None, training_config=TrainingConfig()
)
FULL = replace(LORA, request_id='full', full_parameters=())


@pytest.fixture
def ports() -> Ports:
    """Ports with fakes and a journal in memory."""
    return Ports(
        backend=FakeTrainer(),
        estimator=FakeEstimator(),
        store=FakeStore(),
        exporter=None,  # pyright: ignore[reportArgumentType] - nothing is exported here
        uploads=None,  # pyright: ignore[reportArgumentType] - nor uploaded
        batches=NoDataService(),
        journal=MemoryJournal(),
        codec=CODEC,
        clock=FakeClock(),
    )


async def _execute(verbs: ModelService, caller: Caller, adapter_id: str, number: int, verb: Verb) -> None:
    operation = Operation(adapter_id=adapter_id, sequence_number=number, verb=verb, fingerprint=f'{number}')
    await verbs.execute_operation(caller, operation, is_waiting_allowed=True)


async def test_other_adapters_wait_until_the_lease_ends(ports: Ports) -> None:
    """A lease evicts other adapters, whose operations wait and continue when the lease ends."""
    verbs = make_service(ports, LIMITS)
    lora = await verbs.create_adapter(ALICE, LORA)
    await _execute(verbs, ALICE, lora.adapter_id, 1, ZeroGrad())
    full = await verbs.create_adapter(BOB, FULL)
    assert list(ports.backend.adapters) == [full.adapter_id]
    waiting = asyncio.ensure_future(_execute(verbs, ALICE, lora.adapter_id, 2, ZeroGrad()))
    await _execute(verbs, BOB, full.adapter_id, 1, ZeroGrad())
    assert not waiting.done()
    await verbs.delete_adapter(BOB, full.adapter_id)
    await waiting
    assert list(ports.backend.adapters) == [lora.adapter_id]
    await verbs.close()


async def test_no_adapter_is_created_during_a_lease(ports: Ports) -> None:
    """No other adapter can be created while the replica is leased."""
    verbs = make_service(ports, LIMITS)
    full = await verbs.create_adapter(ALICE, FULL)
    for command in (LORA, replace(FULL, request_id='another')):
        with pytest.raises(ReplicaLeased):
            await verbs.create_adapter(BOB, command)
    await verbs.delete_adapter(ALICE, full.adapter_id)
    await verbs.create_adapter(BOB, LORA)
    await verbs.close()


async def test_failed_creation_leaves_no_lease(ports: Ports) -> None:
    """If the engine refuses a full-parameter adapter, the replica is not leased."""
    verbs = make_service(ports, LIMITS)

    async def refuse(*_args: object, **_options: object) -> None:
        raise ReplicaLeased()

    create, ports.backend.create_adapter = ports.backend.create_adapter, refuse
    with pytest.raises(ReplicaLeased):
        await verbs.create_adapter(ALICE, FULL)
    ports.backend.create_adapter = create
    await verbs.create_adapter(ALICE, LORA)
    await verbs.close()


async def test_lease_holds_after_a_restart(ports: Ports) -> None:
    """The lease still excludes other adapters after a restart, and its holder continues."""
    verbs = make_service(ports, LIMITS)
    full = await verbs.create_adapter(ALICE, FULL)
    await _execute(verbs, ALICE, full.adapter_id, 1, ZeroGrad())
    await verbs.close()
    again = make_service(replace(ports, backend=FakeTrainer()), LIMITS)
    await again.recover()
    with pytest.raises(ReplicaLeased):
        await again.create_adapter(BOB, LORA)
    await _execute(again, ALICE, full.adapter_id, 2, ZeroGrad())
    await again.close()


async def test_weights_of_the_base_are_not_saved_as_an_adapter(ports: Ports) -> None:
    """Save is refused for full-parameter adapters."""
    verbs = make_service(ports, LIMITS)
    full = await verbs.create_adapter(ALICE, FULL)
    with pytest.raises(NotBuiltYet):
        await _execute(verbs, ALICE, full.adapter_id, 1, Save(name='x'))
    await verbs.close()
