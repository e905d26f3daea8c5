"""Executors run each future exactly once despite failures; expiry deletes results and records."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from fixtures.future_stores import MemoryFutureStore, MemoryPayloadStore
from fixtures.futures import running_futures
from fixtures.record_trainer import RecordTrainer
from twinkle_services.gateway.errors import FutureExpired, FutureNotFound
from twinkle_services.gateway.futures.executors import CreateAdapter, DeleteAdapter, ExecuteOperation
from twinkle_services.gateway.futures.records import Expiry, FutureRecords
from twinkle_services.gateway.futures.rules import Future, FutureRequest, FutureTaken
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import (
    AdapterNotFound,
    Cancelled,
    DeadlinePassed,
    DomainError,
    InvalidField,
    QueueFull,
    ServiceUnreachable,
)
from twinkle_services.kit.retry import Retry

RETRY = Retry(pause=lambda _: asyncio.sleep(0))
OUTAGE = [ServiceUnreachable('model'), DeadlinePassed(), QueueFull(1, 1), ServiceUnreachable('model')]


async def accepted(store: MemoryFutureStore, key: str) -> Future:
    """Store an accepted future and return it."""
    request = FutureRequest(kind='execute', key=key, payload=key.encode(), session_id='', lane='ad-1')
    return await store.add_if_absent(
        Future.accepted(request, tenant_id='alice', moment=datetime(2026, 1, 1, tzinfo=UTC))
    )


@pytest.mark.parametrize('failure_list', ['failures', 'late_failures'])
async def test_operation_is_applied_once_despite_an_outage(failure_list: str) -> None:
    """An operation runs once if several calls fail, whether they fail before or after the operation runs."""
    trainer, store = RecordTrainer(), MemoryFutureStore()
    setattr(trainer, failure_list, list(OUTAGE))
    execute = ExecuteOperation(trainer, store, RETRY)
    future = await accepted(store, 'one')
    assert await execute(future, b'one') == b'ran one'
    assert trainer.applied == [b'one']
    assert (await store.get('alice', future.future_id)) == replace(future, number=1)


async def test_operation_that_ran_before_a_crash_returns_its_recorded_result() -> None:
    """A resumed operation is sent again with its stored number, and the service returns the recorded result."""
    trainer, store = RecordTrainer(), MemoryFutureStore()
    future = await accepted(store, 'one')
    assert await ExecuteOperation(trainer, store, RETRY)(future, b'one') == b'ran one'
    resumed = store.futures[future.future_id]
    assert await ExecuteOperation(trainer, store, RETRY)(resumed, b'one') == b'ran one'
    assert trainer.applied == [b'one']


async def test_number_of_another_operation_is_replaced() -> None:
    """An operation gets a new number if another caller used its number or the service lost its latest operations."""
    trainer, store = RecordTrainer(applied=[b'native'], returned_numbers=[0, 7, 1]), MemoryFutureStore()
    future = await accepted(store, 'one')
    assert await ExecuteOperation(trainer, store, RETRY)(future, b'one') == b'ran one'
    assert trainer.applied == [b'native', b'one']
    assert store.futures[future.future_id].number == 2


async def test_number_of_a_refused_operation_is_reused() -> None:
    """The operation after a refused operation uses the number of the refused one, so that no number is skipped."""
    trainer, store = RecordTrainer(), MemoryFutureStore()
    execute = ExecuteOperation(trainer, store, RETRY)
    first, second = await accepted(store, 'one'), await accepted(store, 'two')
    # This is the stored state after a crash between numbering and sending.
    number = await store.number(first, 1, instead_of=None)
    trainer.failures = [InvalidField('operation', 'is wrong')]
    with pytest.raises(InvalidField):
        await execute(replace(first, number=number), b'one')
    assert await execute(second, b'two') == b'ran two'
    assert trainer.applied == [b'two']


class SlowStore(MemoryFutureStore):
    """Store that waits for its gate before it stores a number."""

    def __init__(self) -> None:
        super().__init__()
        self.number_requested, self.gate = asyncio.Event(), asyncio.Event()

    async def number(self, future: Future, number: int, *, instead_of: int | None) -> int:
        """Store the number once the gate is open."""
        self.number_requested.set()
        await self.gate.wait()
        return await super().number(future, number, instead_of=instead_of)


async def test_operation_cancelled_while_it_is_numbered_is_not_sent() -> None:
    """An operation that is cancelled while its number is stored is not sent, and the next one uses that number."""
    trainer, store = RecordTrainer(), SlowStore()
    execute = ExecuteOperation(trainer, store, RETRY)
    first, second = await accepted(store, 'one'), await accepted(store, 'two')
    running = asyncio.create_task(execute(first, b'one'))
    await store.number_requested.wait()
    assert not await execute.stop(first)
    store.gate.set()
    with pytest.raises(Cancelled):
        await running
    assert await execute(second, b'two') == b'ran two'
    assert (trainer.applied, trainer.cancelled) == ([b'two'], [])


@pytest.mark.parametrize('is_numbered', [False, True], ids=['before numbering', 'after numbering'])
async def test_operation_of_another_gateway_is_neither_numbered_nor_settled(is_numbered: bool) -> None:  # noqa: FBT001
    """A gateway that lost its lease cannot change a future that another gateway owns."""
    trainer, store = RecordTrainer(), MemoryFutureStore()
    future = await accepted(store, 'one')
    if is_numbered:
        await store.number(future, 1, instead_of=None)
    taken = store.futures[future.future_id] = replace(store.futures[future.future_id], owner='gw-other')
    with pytest.raises(FutureTaken):
        await ExecuteOperation(trainer, store, RETRY)(future, b'one')
    assert (await store.settle(future.done(moment=future.create_time)), trainer.applied) == (taken, [])


async def test_adapter_is_created_once_despite_an_outage() -> None:
    """Repeated creations have the same request id, so only one adapter is created."""
    trainer, store = RecordTrainer(late_failures=list[DomainError](OUTAGE)), MemoryFutureStore()
    future = await accepted(store, 'one')
    assert await CreateAdapter(trainer, RETRY)(future, b'adapter') == b'adapter'
    assert trainer.created == {future.future_id: b'adapter'}


async def test_repeated_deletion_succeeds() -> None:
    """A repeated deletion that finds no adapter succeeds; a first deletion that finds no adapter fails."""
    trainer, store = RecordTrainer(late_failures=[ServiceUnreachable('model')]), MemoryFutureStore()
    delete = DeleteAdapter(trainer, store, RETRY)
    future = await accepted(store, 'one')
    assert await delete(future, b'ad-1') == b''
    assert await delete(store.futures[future.future_id], b'ad-1') == b''
    with pytest.raises(AdapterNotFound):
        await delete(await accepted(store, 'two'), b'ad-1')


async def test_results_expire_and_stray_files_are_deleted() -> None:
    """Sweeps delete files without a future, and results and records that have expired; they keep everything else."""
    clock = FakeClock()
    payloads = MemoryPayloadStore(clock)
    async with running_futures(stores=(MemoryFutureStore(), payloads)) as gateway:
        records = FutureRecords(gateway.store, payloads, retry=RETRY, clock=clock)
        expiry = Expiry(records=records, results_for=timedelta(hours=6), records_for=timedelta(days=7))
        future = await gateway.submit('one')
        assert await gateway.outcome(future) == b'eno'
        gateway.recorder.gate.clear()
        waiting = await gateway.submit('two')
        await payloads.put('fu-stray-1.request', b'left by a killed process')
        clock.advance(timedelta(hours=5))
        assert await expiry.sweep() == 0
        assert payloads.kept.keys() == {future.result_name, waiting.payload_name}
        clock.advance(timedelta(hours=2))
        assert await expiry.sweep() == 1
        assert payloads.kept.keys() == {waiting.payload_name}
        with pytest.raises(FutureExpired):
            await gateway.futures.wait(future.future_id, seconds=0)
        clock.advance(timedelta(days=7))
        assert await expiry.sweep() == 0
        with pytest.raises(FutureNotFound):
            await gateway.futures.wait(future.future_id, seconds=0)
        gateway.recorder.gate.set()
        assert await gateway.outcome(waiting) == b'owt'


def test_busy_and_unavailable_services_are_retried() -> None:
    """Errors of an unavailable or busy service are transient; FutureNotFound is not."""
    failures = (ServiceUnreachable('model'), DeadlinePassed(), QueueFull(1, 1))
    assert all(error.disposition.is_transient for error in failures)
    assert not FutureNotFound('x').disposition.is_transient
