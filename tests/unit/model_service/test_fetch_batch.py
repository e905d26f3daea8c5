"""Batches of loaders: each is fetched once, when its operation is next, and not again for a recorded operation."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest

from fixtures.fake_batches import FakeBatches, FakeLoader
from fixtures.fake_trainer import VOCABULARY
from fixtures.journals import CODEC
from fixtures.model_verbs import FakePorts, create_request, let_others_run
from twinkle.api.model.v1 import operation_pb2
from twinkle.data_format import InputFeature
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import (
    AdapterNotFound,
    Cancelled,
    Draining,
    InvalidField,
    NotBuiltYet,
    ScopeMissing,
    ServiceUnreachable,
)
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.model.api.convert_operation import operation_from_proto
from twinkle_services.model.application.fetch_batch import FetchBatch
from twinkle_services.model.application.operations import OperationState
from twinkle_services.model.application.train_stream import OperationFailure
from twinkle_services.model.backends.data_client import NoDataService
from twinkle_services.model.domain.errors import LoaderAtEnd, SequenceReused
from twinkle_services.model.domain.loader_batch import LoaderCursor
from twinkle_services.model.domain.operation import Operation, ZeroGrad
from twinkle_services.model.domain.result import OperationResult

ALICE = Caller(tenant_id='alice', scopes=frozenset({'train', 'data'}))


def example(token: int, length: int = 4) -> InputFeature:
    """Return an example with one repeated token."""
    ids = np.full(length, token)
    return InputFeature(input_ids=ids, labels=ids)


def by_handle(adapter_id: str, number: int, *, loader_id: str = 'ld', consumed: int = 0) -> Operation:
    """Return forward_backward for the loader's batch that starts after `consumed` examples."""
    batch = operation_pb2.Batch(loader={'loader_id': loader_id, 'cursor': {'consumed_rows': consumed}})
    message = operation_pb2.Operation(
        adapter_id=adapter_id, sequence_number=number, forward_backward=operation_pb2.ForwardBackward(batch=batch)
    )
    return operation_from_proto(message, 'operation', vocabulary_size=VOCABULARY)


class Harness(FakePorts):
    """The service with alice's loader of five examples in batches of two."""

    def __init__(self) -> None:
        super().__init__()
        self.batches.loaders['ld'] = FakeLoader('alice', [example(token) for token in range(3, 8)], 2)
        self.served = self.verbs()

    async def create(self) -> str:
        """Create an adapter; return its id."""
        return (await self.served.create_adapter(ALICE, create_request())).adapter_id

    async def execute(self, operation: Operation, caller: Caller = ALICE):
        """Execute an operation."""
        with acting_for(caller):
            return await self.served.execute_operation(caller, operation, is_waiting_allowed=False)


async def test_batch_is_fetched_and_the_next_cursor_returned():
    """The journal has the loader's examples, the receipt counts their tokens, and the result has the next cursor."""
    harness = Harness()
    adapter_id = await harness.create()
    result = await harness.execute(by_handle(adapter_id, 1, consumed=2))
    assert result.receipt.token_count == 8
    assert result.next_cursor.consumed_rows == 4
    journaled = (await harness.journal.entries(adapter_id, after=0, until=1))[0].operation
    assert [list(feature['input_ids']) for feature in journaled.verb.features] == [[5] * 4, [6] * 4]


async def test_repeat_does_not_fetch():
    """A repeat gets the recorded result without a call to the data service; a repeat with another cursor is refused."""
    harness = Harness()
    adapter_id = await harness.create()
    first = await harness.execute(by_handle(adapter_id, 1))
    del harness.batches.loaders['ld']
    assert await harness.execute(by_handle(adapter_id, 1)) == replace(first, is_replayed=True)
    assert len(harness.batches.references) == 1
    with pytest.raises(SequenceReused):
        await harness.execute(by_handle(adapter_id, 1, consumed=2))


@pytest.mark.parametrize('failure', [ServiceUnreachable('data'), InvalidField('batch.loader.cursor', 'no')])
async def test_refusal_does_not_use_the_number(failure):
    """A failed fetch does not consume the sequence number, and the same operation succeeds later."""
    harness = Harness()
    adapter_id = await harness.create()
    harness.batches.failures.append(failure)
    with pytest.raises(type(failure)):
        await harness.execute(by_handle(adapter_id, 1))
    assert not await harness.journal.entries(adapter_id, after=0, until=0)
    result = await harness.execute(by_handle(adapter_id, 1))
    assert (result.sequence_number, result.is_replayed) == (1, False)


async def test_end_of_the_loader_uses_the_number():
    """The end of the loader is recorded as the operation's error, and the next operation follows without a gap."""
    harness = Harness()
    adapter_id = await harness.create()
    for _ in range(2):
        with pytest.raises(LoaderAtEnd):
            await harness.execute(by_handle(adapter_id, 1, consumed=5))
    assert len(harness.batches.references) == 1
    record = await harness.served.operations.find(ALICE, adapter_id, 1)
    assert record.state is OperationState.FAILED
    await harness.execute(replace(by_handle(adapter_id, 2), verb=ZeroGrad(), batch_reference=None))


async def test_key_without_the_scope_reads_no_data():
    """A key without the scope `data` cannot train on a loader."""
    harness = Harness()
    adapter_id = await harness.create()
    with pytest.raises(ScopeMissing):
        await harness.execute(by_handle(adapter_id, 1), Caller(tenant_id='alice', scopes=frozenset({'train'})))
    assert not harness.batches.references


async def test_without_a_data_service_handles_are_refused():
    """An operation with a loader is refused if no data service is configured."""
    with pytest.raises(NotBuiltYet), acting_for(ALICE):
        await NoDataService().load(by_handle('ad', 1).batch_reference)


def fill_of(batches: FakeBatches, *, tenant_bytes: int) -> FetchBatch:
    """Return a batch fetcher with this limit on the bytes of a tenant's batches in memory."""
    return FetchBatch(batches, CODEC, tenant_bytes=tenant_bytes)


class CountingBatches(FakeBatches):
    """Fake loaders that count concurrent fetches; the fetches wait until the gate is open."""

    def __init__(self, gate: asyncio.Event) -> None:
        super().__init__({'ld': FakeLoader('alice', [example(token) for token in range(3, 8)], 1)})
        self.gate, self.current, self.most = gate, 0, 0

    async def load(self, place):
        """Load a batch once the gate is open."""
        self.current += 1
        self.most = max(self.most, self.current)
        await self.gate.wait()
        self.current -= 1
        return await super().load(place)


async def test_one_batch_per_tenant_waits_for_memory():
    """Each tenant fetches one batch at a time, and the next fetch waits until earlier batches are released."""
    gate = asyncio.Event()
    batches = CountingBatches(gate)
    with acting_for(ALICE):
        size = len((await FakeBatches(batches.loaders).load(by_handle('ad', 1).batch_reference)).content)
    fill = fill_of(batches, tenant_bytes=2 * size * 16 // 15 + 16)
    release, filled = asyncio.Event(), []

    async def use(consumed):
        with acting_for(ALICE):
            async with AsyncExitStack() as stack:
                filled.append(await fill(stack, ALICE, by_handle(f'ad-{consumed}', 1, consumed=consumed)))
                await release.wait()

    async with asyncio.TaskGroup() as group:
        for consumed in range(4):
            group.create_task(use(consumed))
        gate.set()
        await let_others_run()
        assert (batches.most, len(filled)) == (1, 2)
        assert len(batches.references) == 3
        release.set()
    assert sorted(item.next_cursor.consumed_rows for item in filled) == [1, 2, 3, 4]
    assert filled[0].batch_reference.cursor == LoaderCursor(consumed_rows=0)


class SlowHarness(Harness):
    """A harness whose data service does not respond until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.batches = CountingBatches(self.gate)
        self.served = self.verbs()

    async def begin(self, operation: Operation) -> asyncio.Task:
        """Start an operation; return its task while its batch is being fetched."""
        task = asyncio.create_task(self.execute(operation))
        await let_others_run()
        assert self.batches.current == 1
        return task


async def test_a_fetch_can_be_cancelled():
    """A cancelled fetch does not consume the number, and the tenant's next batch is fetched."""
    harness = SlowHarness()
    adapter_id = await harness.create()
    task = await harness.begin(by_handle(adapter_id, 1))
    assert await harness.served.operations.cancel(ALICE, adapter_id, 1)
    with pytest.raises(Cancelled):
        await task
    harness.gate.set()
    result = await harness.execute(by_handle(adapter_id, 1))
    assert (result.sequence_number, result.is_replayed) == (1, False)
    assert not await harness.served.operations.cancel(ALICE, adapter_id, 1)


async def test_deletion_does_not_wait_for_a_batch():
    """Deleting an adapter does not wait for its fetch; the operation raises AdapterNotFound."""
    harness = SlowHarness()
    adapter_id = await harness.create()
    task = await harness.begin(by_handle(adapter_id, 1))
    await harness.served.delete_adapter(ALICE, adapter_id)
    with pytest.raises(AdapterNotFound):
        await task


async def test_shutdown_does_not_wait_for_a_batch():
    """A shutdown ends running fetches with a retryable error, and new fetches are refused."""
    harness = SlowHarness()
    adapter_id = await harness.create()
    task = await harness.begin(by_handle(adapter_id, 1))
    await harness.served.close()
    with pytest.raises(Draining):
        await task
    with pytest.raises(Draining):
        await harness.execute(by_handle(adapter_id, 1))


async def test_operation_completes_after_its_caller_disconnects():
    """An operation completes although its caller disconnects during the fetch, and a repeat gets the result."""
    harness = SlowHarness()
    adapter_id = await harness.create()
    task = await harness.begin(by_handle(adapter_id, 1))
    task.cancel()
    await asyncio.wait([task])
    repeat = asyncio.create_task(harness.execute(by_handle(adapter_id, 1)))
    harness.gate.set()
    assert (await repeat).next_cursor.consumed_rows == 1
    assert len(harness.batches.references) == 1


async def test_tenants_do_not_wait_for_each_others_batches():
    """A slow fetch of one tenant does not delay another tenant."""
    gate = asyncio.Event()
    batches = CountingBatches(gate)
    fill = fill_of(batches, tenant_bytes=1 << 20)
    bob = Caller(tenant_id='bob', scopes=ALICE.scopes)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for caller, adapter_id in ((ALICE, 'a1'), (ALICE, 'a2'), (bob, 'b1')):
            with acting_for(ALICE):
                group.create_task(fill(stack, caller, by_handle(adapter_id, 1)))
        await let_others_run()
        assert batches.current == 2
        gate.set()


async def test_number_is_used_on_the_current_adapter_state():
    """If a failed fetch consumes its sequence number, a change of the adapter during the fetch is kept."""
    harness = SlowHarness()
    adapter_id = await harness.create()
    task = await harness.begin(by_handle(adapter_id, 1, consumed=5))
    directory = harness.served.directory
    directory.refresh(replace(directory.get(ALICE, adapter_id), checkpoint_path='twinkle://saved'))
    harness.gate.set()
    with pytest.raises(LoaderAtEnd):
        await task
    adapter = directory.get(ALICE, adapter_id)
    assert (adapter.sequence_number, adapter.checkpoint_path) == (1, 'twinkle://saved')


async def follow(harness: Harness, operations: list[Operation]) -> list[OperationResult | OperationFailure]:
    """Send the operations in one stream; return the results."""

    async def send():
        for operation in operations:
            yield operation

    with acting_for(ALICE):
        return [item async for item in harness.served.train_stream(ALICE, send())]


async def test_pipelined_handles_of_two_adapters_are_answered_in_order():
    """Pipelined operations of two adapters get the batches after their cursors, in order."""
    harness = Harness()
    first, second = (
        await harness.create(),
        (await harness.served.create_adapter(ALICE, create_request('r2'))).adapter_id,
    )
    cursors = [(1, 0), (2, 2), (3, 4), (4, 0)]
    sent = [by_handle(adapter_id, number, consumed=at) for number, at in cursors for adapter_id in (first, second)]
    results = await follow(harness, sent)
    for adapter_id in (first, second):
        own = [item for item in results if item.adapter_id == adapter_id]
        assert [(item.sequence_number, item.next_cursor.consumed_rows) for item in own] == [
            (1, 2),
            (2, 4),
            (3, 5),
            (4, 2),
        ]


async def test_pipelined_operations_after_an_unknown_loader_are_not_applied():
    """Pipelined operations after an operation with an unknown loader are not applied."""
    harness = Harness()
    adapter_id = await harness.create()
    sent = [by_handle(adapter_id, 1), by_handle(adapter_id, 2, loader_id='gone'), by_handle(adapter_id, 3, consumed=2)]
    done, missing, behind = await follow(harness, sent)
    assert done.next_cursor.consumed_rows == 2
    assert [missing.error.reason, behind.error.reason] == ['LOADER_NOT_FOUND', 'SEQUENCE_GAP']
    assert (await harness.execute(by_handle(adapter_id, 2, consumed=2))).next_cursor.consumed_rows == 4
