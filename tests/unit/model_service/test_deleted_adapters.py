"""Tests of deleted adapters: their operations, running or waiting, and their versions."""

import asyncio

import pytest

from fixtures.model_verbs import ALICE, Harness, let_others_run
from twinkle_services.kit.errors import AdapterNotFound
from twinkle_services.model.domain.operation import PublishVersion, Step


async def test_waiting_operations_of_a_deleted_adapter_fail() -> None:
    """Operations that wait for a running operation raise AdapterNotFound after the adapter is deleted."""
    harness = Harness()
    adapter = await harness.adapter()
    harness.trainer.gate.clear()
    running = asyncio.ensure_future(harness.execute(adapter, 1, Step()))
    waiting = asyncio.ensure_future(harness.execute(adapter, 2, Step()))
    behind_a_gap = asyncio.ensure_future(harness.execute(adapter, 9, Step()))
    await let_others_run()
    deleting = asyncio.ensure_future(harness.delete(ALICE, adapter.adapter_id))
    await let_others_run()
    harness.trainer.gate.set()
    await asyncio.gather(running, deleting)
    for operation in (waiting, behind_a_gap):
        with pytest.raises(AdapterNotFound):
            await operation


async def test_deletion_fails_operations_that_wait_for_the_engine() -> None:
    """Operations that wait for the engine when their adapter is deleted fail and never run."""
    harness = Harness()
    busy, adapter = await harness.adapter(), await harness.adapter(request_id='r2')
    harness.trainer.gate.clear()
    running = asyncio.ensure_future(harness.execute(busy, 1, Step()))
    await let_others_run()
    waiting = asyncio.ensure_future(harness.execute(adapter, 1, Step()))
    next_operation = asyncio.ensure_future(harness.execute(adapter, 2, Step()))
    await let_others_run()
    # The gate stays closed, so the call would hang here if it waited for the engine.
    await harness.delete(ALICE, adapter.adapter_id)
    for operation in (waiting, next_operation):
        with pytest.raises(AdapterNotFound):
            await operation
    harness.trainer.gate.set()
    await running
    assert [ran_id for ran_id, _ in harness.trainer.ran] == [busy.adapter_id]


async def test_versions_of_a_deleted_adapter_are_deleted_before_the_service_closes() -> None:
    """The versions of a deleted adapter are deleted before `close` returns; other adapters' versions remain."""
    harness = Harness()
    deleted, other = await harness.adapter(), await harness.adapter(request_id='r2')
    for adapter in (deleted, other):
        for number in (1, 2):
            await harness.execute(adapter, number, PublishVersion())
    await harness.delete(ALICE, deleted.adapter_id)
    await harness.service.close()
    assert harness.store.versions == [(other.adapter_id, 1), (other.adapter_id, 2)]


async def test_cancelled_deletion_completes_and_deletes_the_versions() -> None:
    """If the caller of a deletion disconnects, the adapter and its versions are still deleted."""
    harness = Harness()
    adapter = await harness.adapter()
    await harness.execute(adapter, 1, PublishVersion())
    harness.trainer.gate.clear()
    running = asyncio.ensure_future(harness.execute(adapter, 2, Step()))
    await let_others_run()
    deleting = asyncio.ensure_future(harness.delete(ALICE, adapter.adapter_id))
    await let_others_run()
    deleting.cancel()
    await let_others_run()
    harness.trainer.gate.set()
    await running
    await harness.service.close()
    assert harness.store.versions == []
