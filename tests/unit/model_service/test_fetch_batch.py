"""Batches by handle: fetched once, when it is the operation's turn, and never for what is on record."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest

from fixtures.fake_batches import FakeBatches, FakeLoader
from fixtures.fake_trainer import VOCABULARY
from fixtures.journals import CODEC
from fixtures.model_verbs import FakeWorld, create_command, let_others_run
from services.kit.caller import Caller
from services.kit.errors import (
    AdapterNotFound,
    Cancelled,
    Draining,
    InvalidField,
    NotBuiltYet,
    ScopeMissing,
    ServiceUnreachable,
)
from services.kit.rpc.context import acting_for
from services.model.api.convert_operation import operation_from_proto
from services.model.application.fetch_batch import FetchBatch
from services.model.application.operations import OperationState
from services.model.application.train_stream import OperationFailure
from services.model.backends.data_client import NoDataService
from services.model.domain.errors import LoaderAtEnd, SequenceReused
from services.model.domain.loader_batch import LoaderCursor
from services.model.domain.operation import Operation, ZeroGrad
from services.model.domain.result import OperationResult
from twinkle.api.model.v1 import operation_pb2
from twinkle.data_format import InputFeature

ALICE = Caller(tenant_id='alice', scopes=frozenset({'train', 'data'}))


def example(token: int, length: int = 4) -> InputFeature:
    """Return an example of one token again and again."""
    ids = np.full(length, token)
    return InputFeature(input_ids=ids, labels=ids)


def by_handle(adapter_id: str, number: int, *, loader_id: str = 'ld', consumed: int = 0) -> Operation:
    """Return forward_backward over the batch behind so many examples."""
    batch = operation_pb2.Batch(loader={'loader_id': loader_id, 'cursor': {'consumed_rows': consumed}})
    message = operation_pb2.Operation(
        adapter_id=adapter_id, sequence_number=number, forward_backward=operation_pb2.ForwardBackward(batch=batch)
    )
    return operation_from_proto(message, 'operation', vocabulary_size=VOCABULARY)


class Ports(FakeWorld):
    """Verbs that act for alice, who has a loader of five examples and an adapter."""

    def __init__(self) -> None:
        """Begin."""
        super().__init__()
        self.batches.loaders['ld'] = FakeLoader('alice', [example(token) for token in range(3, 8)], 2)
        self.served = self.verbs()

    async def create(self) -> str:
        """Return the id of a new adapter."""
        return (await self.served.create_adapter(ALICE, create_command())).adapter_id

    async def execute(self, operation: Operation, caller: Caller = ALICE):
        """Carry an operation out."""
        with acting_for(caller):
            return await self.served.execute_operation(caller, operation, is_waiting_allowed=False)


async def test_batch_is_fetched_and_the_next_place_told():
    """The engine gets the loader's examples, the receipt counts their tokens, the result says where to go on."""
    ports = Ports()
    adapter_id = await ports.create()
    result = await ports.execute(by_handle(adapter_id, 1, consumed=2))
    assert result.receipt.token_count == 8
    assert result.next_cursor.consumed_rows == 4
    journaled = (await ports.journal.entries(adapter_id, after=0, until=1))[0].operation
    assert [list(feature['input_ids']) for feature in journaled.verb.features] == [[5] * 4, [6] * 4]


async def test_repeat_asks_nobody():
    """What is on record is answered from it, also while the data service is away; another place is another content."""
    ports = Ports()
    adapter_id = await ports.create()
    first = await ports.execute(by_handle(adapter_id, 1))
    del ports.batches.loaders['ld']
    assert await ports.execute(by_handle(adapter_id, 1)) == replace(first, is_replayed=True)
    assert len(ports.batches.places) == 1
    with pytest.raises(SequenceReused):
        await ports.execute(by_handle(adapter_id, 1, consumed=2))


@pytest.mark.parametrize('failure', [ServiceUnreachable('data'), InvalidField('batch.loader.cursor', 'no')])
async def test_refusal_leaves_the_number_free(failure):
    """Nothing was applied; the same operation again is carried out."""
    ports = Ports()
    adapter_id = await ports.create()
    ports.batches.failures.append(failure)
    with pytest.raises(type(failure)):
        await ports.execute(by_handle(adapter_id, 1))
    assert not await ports.journal.entries(adapter_id, after=0, until=0)
    result = await ports.execute(by_handle(adapter_id, 1))
    assert (result.sequence_number, result.is_replayed) == (1, False)


async def test_end_of_the_loader_uses_up_the_number_for_good():
    """Its error is on record, and the next operation follows without a gap."""
    ports = Ports()
    adapter_id = await ports.create()
    for _ in range(2):
        with pytest.raises(LoaderAtEnd):
            await ports.execute(by_handle(adapter_id, 1, consumed=5))
    assert len(ports.batches.places) == 1
    record = await ports.served.operations.find(ALICE, adapter_id, 1)
    assert record.state is OperationState.FAILED
    await ports.execute(replace(by_handle(adapter_id, 2), verb=ZeroGrad(), batch_reference=None))


async def test_key_without_the_scope_reads_no_data():
    """Training on a loader is reading it."""
    ports = Ports()
    adapter_id = await ports.create()
    with pytest.raises(ScopeMissing):
        await ports.execute(by_handle(adapter_id, 1), Caller(tenant_id='alice', scopes=frozenset({'train'})))
    assert not ports.batches.places


async def test_without_a_data_service_handles_are_refused():
    """A service that was told no address says so, and leaves the number free."""
    with pytest.raises(NotBuiltYet), acting_for(ALICE):
        await NoDataService().load(by_handle('ad', 1).batch_reference)


def fill_of(batches: FakeBatches, *, tenant_bytes: int, alone: str = '') -> FetchBatch:
    """Return what fills operations, of which one adapter may have the replica for itself."""
    return FetchBatch(batches, CODEC, tenant_bytes=tenant_bytes, is_alone=lambda adapter_id: adapter_id == alone)


class CountingBatches(FakeBatches):
    """Counts how many are being fetched at a time."""

    def __init__(self, gate: asyncio.Event) -> None:
        """Fetch while the gate is open."""
        super().__init__({'ld': FakeLoader('alice', [example(token) for token in range(3, 8)], 1)})
        self.gate, self.current, self.most = gate, 0, 0

    async def load(self, place):
        """Wait at the gate."""
        self.current += 1
        self.most = max(self.most, self.current)
        await self.gate.wait()
        self.current -= 1
        return await super().load(place)


async def test_what_waits_for_room_is_one_batch_of_each_tenant():
    """One is fetched at a time, and the next once those under way leave room for it."""
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
        assert len(batches.places) == 3
        release.set()
    assert sorted(item.next_cursor.consumed_rows for item in filled) == [1, 2, 3, 4]
    assert filled[0].batch_reference.cursor == LoaderCursor(consumed_rows=0)


class SlowWorld(Ports):
    """A ports whose data service takes its time."""

    def __init__(self) -> None:
        """Begin with the gate shut."""
        super().__init__()
        self.gate = asyncio.Event()
        self.batches = CountingBatches(self.gate)
        self.served = self.verbs()

    async def begin(self, operation: Operation) -> asyncio.Task:
        """Return an operation under way, whose batch is waited for."""
        task = asyncio.create_task(self.execute(operation))
        await let_others_run()
        assert self.batches.current == 1
        return task


async def test_what_is_fetched_can_be_cancelled():
    """Nothing was applied; the number is free, and the tenant's next batch is fetched."""
    ports = SlowWorld()
    adapter_id = await ports.create()
    task = await ports.begin(by_handle(adapter_id, 1))
    assert await ports.served.operations.cancel(ALICE, adapter_id, 1)
    with pytest.raises(Cancelled):
        await task
    ports.gate.set()
    result = await ports.execute(by_handle(adapter_id, 1))
    assert (result.sequence_number, result.is_replayed) == (1, False)
    assert not await ports.served.operations.cancel(ALICE, adapter_id, 1)


async def test_deletion_does_not_wait_for_a_batch():
    """The adapter is gone at once, however long the data service takes; the operation finds it so."""
    ports = SlowWorld()
    adapter_id = await ports.create()
    task = await ports.begin(by_handle(adapter_id, 1))
    await ports.served.delete_adapter(ALICE, adapter_id)
    with pytest.raises(AdapterNotFound):
        await task


async def test_end_of_the_service_does_not_wait_for_a_batch():
    """What is fetched then is to be tried again, and so is what comes after."""
    ports = SlowWorld()
    adapter_id = await ports.create()
    task = await ports.begin(by_handle(adapter_id, 1))
    await ports.served.close()
    with pytest.raises(Draining):
        await task
    with pytest.raises(Draining):
        await ports.execute(by_handle(adapter_id, 1))


async def test_caller_that_goes_away_leaves_the_operation_to_its_end():
    """Its batch is fetched all the same, and a repeat gets the result."""
    ports = SlowWorld()
    adapter_id = await ports.create()
    task = await ports.begin(by_handle(adapter_id, 1))
    task.cancel()
    await asyncio.wait([task])
    repeat = asyncio.create_task(ports.execute(by_handle(adapter_id, 1)))
    ports.gate.set()
    assert (await repeat).next_cursor.consumed_rows == 1
    assert len(ports.batches.places) == 1


async def test_tenants_do_not_wait_for_each_others_batches():
    """One that is slow holds up its own tenant's alone."""
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


async def test_adapter_that_is_alone_waits_for_no_room():
    """Those that hold all room may be waiting for its end, which would never come."""
    gate = asyncio.Event()
    gate.set()
    fill = fill_of(CountingBatches(gate), tenant_bytes=16, alone='alone')
    async with AsyncExitStack() as held:
        with acting_for(ALICE):
            await fill(held, ALICE, by_handle('first', 1))
            waiting = asyncio.create_task(fill(held, ALICE, by_handle('second', 1)))
            await let_others_run()
            filled = await fill(held, ALICE, by_handle('alone', 1))
        assert not filled.is_batch_missing
        assert not waiting.done()
        fill.cancel('second')
        with pytest.raises(Cancelled):
            await waiting


async def test_number_is_used_up_on_the_adapter_as_it_is_by_then():
    """What became of the adapter while its batch was on the way stays known."""
    ports = SlowWorld()
    adapter_id = await ports.create()
    task = await ports.begin(by_handle(adapter_id, 1, consumed=5))
    directory = ports.served.directory
    directory.refresh(replace(directory.get(ALICE, adapter_id), checkpoint_path='twinkle://saved'))
    ports.gate.set()
    with pytest.raises(LoaderAtEnd):
        await task
    adapter = directory.get(ALICE, adapter_id)
    assert (adapter.sequence_number, adapter.checkpoint_path) == (1, 'twinkle://saved')


async def follow(ports: Ports, operations: list[Operation]) -> list[OperationResult | OperationFailure]:
    """Return what a stream of operations, sent at once, answers in its order."""

    async def send():
        for operation in operations:
            yield operation

    with acting_for(ALICE):
        return [item async for item in ports.served.train_stream(ALICE, send())]


async def test_pipelined_handles_of_two_adapters_are_answered_in_order():
    """Each gets the batches of its own places, one after the other."""
    ports = Ports()
    first, second = await ports.create(), (await ports.served.create_adapter(ALICE, create_command('r2'))).adapter_id
    places = [(1, 0), (2, 2), (3, 4), (4, 0)]
    sent = [by_handle(adapter_id, number, consumed=at) for number, at in places for adapter_id in (first, second)]
    results = await follow(ports, sent)
    for adapter_id in (first, second):
        own = [item for item in results if item.adapter_id == adapter_id]
        assert [(item.sequence_number, item.next_cursor.consumed_rows) for item in own] == [
            (1, 2),
            (2, 4),
            (3, 5),
            (4, 2),
        ]


async def test_pipelined_handles_behind_a_missing_loader_are_not_carried_out():
    """Nothing is applied that was sent in the belief that what is before it works."""
    ports = Ports()
    adapter_id = await ports.create()
    sent = [by_handle(adapter_id, 1), by_handle(adapter_id, 2, loader_id='gone'), by_handle(adapter_id, 3, consumed=2)]
    done, missing, behind = await follow(ports, sent)
    assert done.next_cursor.consumed_rows == 2
    assert [missing.error.reason, behind.error.reason] == ['LOADER_NOT_FOUND', 'SEQUENCE_GAP']
    assert (await ports.execute(by_handle(adapter_id, 2, consumed=2))).next_cursor.consumed_rows == 4
