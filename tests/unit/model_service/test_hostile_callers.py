"""Callers that disconnect during a request, and slow checkpoints, do not block other callers."""

import asyncio

import pytest

from fixtures.model_verbs import ALICE, BOB, FakePorts, create_request, execute, let_others_run, training
from twinkle_services.model.application.resident import ResidencyBounds


async def test_deletion_completes_after_its_caller_disconnects() -> None:
    """A deletion completes although its caller disconnects: the journal has no adapter, and the lease is free."""
    ports = FakePorts()
    verbs = ports.verbs(residency=ResidencyBounds(is_lease_allowed=True))
    full = await verbs.create_adapter(ALICE, create_request('full', full_parameters=()))
    ports.trainer.gate.clear()
    running = asyncio.ensure_future(execute(verbs, full, 1, training()))
    await let_others_run()
    deleting = asyncio.ensure_future(verbs.delete_adapter(ALICE, full.adapter_id))
    await let_others_run()
    deleting.cancel()
    await let_others_run()
    ports.trainer.gate.set()
    await running
    await let_others_run()
    assert not await ports.journal.adapters()
    assert not ports.trainer.adapters
    await verbs.create_adapter(BOB, create_request('next'))
    await verbs.close()


async def test_shutdown_waits_for_a_running_deletion() -> None:
    """A shutdown waits for a deletion whose caller has disconnected before it closes the journal."""
    ports = FakePorts()
    verbs = ports.verbs()
    adapter = await verbs.create_adapter(ALICE, create_request())
    ports.trainer.gate.clear()
    running = asyncio.ensure_future(execute(verbs, adapter, 1, training()))
    await let_others_run()
    deleting = asyncio.ensure_future(verbs.delete_adapter(ALICE, adapter.adapter_id))
    await let_others_run()
    deleting.cancel()
    closing = asyncio.ensure_future(verbs.close())
    await let_others_run()
    assert not closing.done()
    ports.trainer.gate.set()
    await closing
    await running
    assert not await ports.journal.adapters()


@pytest.mark.parametrize('full_parameters', [None, ()], ids=['lora', 'full'])
async def test_creation_completes_after_its_caller_disconnects(full_parameters) -> None:
    """A creation completes although its caller disconnects, and a repeated request returns the adapter."""
    ports = FakePorts()
    verbs = ports.verbs(residency=ResidencyBounds(is_lease_allowed=True))
    add_adapter, is_free = ports.journal.add_adapter, asyncio.Event()

    async def add_slowly(*args, **kwargs):
        await asyncio.shield(asyncio.ensure_future(add_adapter(*args, **kwargs)))
        await is_free.wait()

    ports.journal.add_adapter = add_slowly
    command = create_request('r1', full_parameters=full_parameters)
    creating = asyncio.ensure_future(verbs.create_adapter(ALICE, command))
    await let_others_run()
    creating.cancel()
    await let_others_run()
    is_free.set()
    with pytest.raises(asyncio.CancelledError):
        await creating
    made = await verbs.create_adapter(ALICE, command)
    assert [item.adapter.adapter_id for item in await ports.journal.adapters()] == [made.adapter_id]
    await verbs.close()


async def test_slow_checkpoint_delays_only_its_creation() -> None:
    """A slow checkpoint delays only the creation that loads it; a repeated request creates no second adapter."""
    ports = FakePorts()
    verbs = ports.verbs()
    is_free = asyncio.Event()

    async def fetch_slowly(checkpoint_path, *, is_trainer_included):
        del checkpoint_path, is_trainer_included
        await is_free.wait()
        return state

    adapter = await verbs.create_adapter(ALICE, create_request('origin'))
    state = await ports.trainer.export_state(adapter.adapter_id, is_trainer_included=True)
    ports.store.fetch = fetch_slowly
    command = create_request('r1', checkpoint_path='twinkle://a/weights/b')
    slow = [asyncio.ensure_future(verbs.create_adapter(ALICE, command)) for _ in range(2)]
    await let_others_run()
    await asyncio.wait_for(verbs.create_adapter(BOB, create_request('quick')), 5)
    is_free.set()
    first, second = await asyncio.gather(*slow)
    assert first.adapter_id == second.adapter_id
    await verbs.close()
