"""Tests of adapters whose callers choose the id."""

import asyncio
from pathlib import Path

import pytest

from fixtures import journals
from fixtures.crashing import ALICE, Service, StrictStore, start
from fixtures.fake_trainer import BASE_MODEL
from twinkle.data_format import LoraConfig
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import AdapterNotFound, InvalidField, RequestIdReused
from twinkle_services.model.application.create_adapter import CreateAdapterRequest
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.errors import AdapterIdTaken, JournalUnavailable
from twinkle_services.model.domain.training_config import TrainingConfig

BOB = Caller(tenant_id='bob', is_internal=True)
CHOSEN = '0b5c:train:0'


async def create(service: Service, caller: Caller = ALICE, request_id: str = 'r1', *, content: str = 'c') -> Adapter:
    """Request an adapter with the chosen id; return the new or existing adapter."""
    command = CreateAdapterRequest(
        request_id=request_id,
        base_model=BASE_MODEL,
        lora_config=LoraConfig(r=2),
        training_config=TrainingConfig(),
        adapter_id=CHOSEN,
        fingerprint=content,
    )
    return await service.verbs.create_adapter(caller, command)


async def test_the_adapter_has_the_id_and_trains():
    """An adapter with a chosen id is found by this id and can be trained."""
    service = await start(MemoryJournal(), StrictStore())
    assert (await create(service)).adapter_id == CHOSEN
    result = await service.execute(journals.step_operation(1, CHOSEN))
    assert result.outcome.step_count == 1


async def test_clients_cannot_choose_ids():
    """A client that chooses an id gets the same refusal whether the id exists or not, and creates no adapter."""
    service = await start(MemoryJournal(), StrictStore())
    refusals: set[str] = set()
    for tenant_id in ('alice', 'bob'):
        with pytest.raises(InvalidField) as refused:
            await create(service, Caller(tenant_id=tenant_id, scopes=frozenset({'train'})), 'r3')
        refusals.add(str(refused.value))
    await create(service)
    for tenant_id in ('alice', 'bob'):
        with pytest.raises(InvalidField) as refused:
            await create(service, Caller(tenant_id=tenant_id, scopes=frozenset({'train'})), 'r3')
        refusals.add(str(refused.value))
    assert len(refusals) == 1


async def test_the_same_request_finds_the_same_adapter_after_a_restart():
    """A repeated request after a restart returns the adapter's current state; other content with its id is refused."""
    journal = MemoryJournal()
    service = await start(journal, StrictStore())
    await create(service)
    await service.execute(journals.step_operation(1, CHOSEN))
    service = await start(journal, StrictStore())
    assert (await create(service)).sequence_number == 1
    with pytest.raises(RequestIdReused):
        await create(service, content='other')


@pytest.mark.parametrize(('caller', 'request_id'), [(ALICE, 'r2'), (BOB, 'r1')], ids=['mine', "another's"])
async def test_an_id_cannot_be_used_twice(caller: Caller, request_id: str):
    """An id cannot be used again by any tenant, even after its adapter was deleted and the service was restarted."""
    journal = MemoryJournal()
    service = await start(journal, StrictStore())
    await create(service)
    with pytest.raises(AdapterIdTaken):
        await create(service, caller, request_id)
    await service.verbs.delete_adapter(ALICE, CHOSEN)
    service = await start(journal, StrictStore())
    with pytest.raises(AdapterIdTaken):
        await create(service, caller, request_id)
    with pytest.raises(AdapterNotFound):
        await create(service)


async def test_one_of_two_concurrent_requests_gets_the_id():
    """If two concurrent requests choose the same id, one adapter is created and the other request is refused."""
    service = await start(MemoryJournal(), StrictStore())
    outcomes = await asyncio.gather(create(service), create(service, BOB), return_exceptions=True)
    assert sorted(type(one).__name__ for one in outcomes) == ['Adapter', 'AdapterIdTaken']


async def test_a_creation_that_fails_leaves_the_id_free():
    """A failed creation leaves its chosen id available."""
    journal = MemoryJournal()
    service = await start(journal, StrictStore())
    add = journal.add_adapter

    async def refuse(*_args: object, **_kwargs: object) -> None:
        journal.add_adapter = add
        raise JournalUnavailable(CHOSEN)

    journal.add_adapter = refuse
    with pytest.raises(JournalUnavailable):
        await create(service)
    assert (await create(service, BOB)).tenant_id == 'bob'


async def test_generated_ids_cannot_be_chosen(tmp_path: Path):
    """A generated id stays in the journal even after its adapter is deleted, so the id cannot be chosen later."""
    journal = await journals.open_journal(tmp_path)
    adapter = await journals.add(journal, journals.make_adapter('ad-7'))
    await journal.remove_adapter('ad-7')
    await journal.close()
    journal = await journals.open_journal(tmp_path)
    assert await journal.creation_of('ad-7') == journals.creation_of(adapter, 'ad-7')
    await journal.close()
