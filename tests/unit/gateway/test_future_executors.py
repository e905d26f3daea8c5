"""What futures do at the model service, each exactly once whatever fails in between; and what is forgotten when."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from fixtures.future_stores import MemoryFutureStore, MemoryPayloadStore
from fixtures.futures import running_desk
from fixtures.record_trainer import RecordTrainer
from services.gateway.errors import FutureExpired, FutureNotFound
from services.gateway.futures.create_adapter import CreateAdapter
from services.gateway.futures.delete_adapter import DeleteAdapter
from services.gateway.futures.execute import ExecuteOperation
from services.gateway.futures.expire import ExpireFutures
from services.gateway.futures.persistence import Persistence
from services.gateway.futures.rules import Future, FutureRequest, FutureTaken
from services.kit.clock import FakeClock
from services.kit.errors import (
    AdapterNotFound,
    Cancelled,
    DeadlinePassed,
    DomainError,
    InvalidField,
    QueueFull,
    ServiceUnreachable,
)

PERSISTENCE = Persistence(pause=lambda _: asyncio.sleep(0))
OUTAGE = [ServiceUnreachable('model'), DeadlinePassed(), QueueFull(1, 1), ServiceUnreachable('model')]


async def accepted(store: MemoryFutureStore, key: str) -> Future:
    """Return a future that the store knows."""
    order = FutureRequest(kind='execute', key=key, payload=key.encode(), session_id='', lane='ad-1')
    return await store.add_if_absent(Future.accepted(order, tenant_id='alice', moment=datetime(2026, 1, 1, tzinfo=UTC)))


@pytest.mark.parametrize('where', ['failures', 'late_failures'])
async def test_operation_is_applied_once_through_an_outage(where: str) -> None:
    """Whether the service was lost before it ran or before it answered, however often."""
    trainer, store = RecordTrainer(), MemoryFutureStore()
    setattr(trainer, where, list(OUTAGE))
    execute = ExecuteOperation(trainer, store, PERSISTENCE)
    future = await accepted(store, 'one')
    assert await execute(future, b'one') == b'ran one'
    assert trainer.applied == [b'one']
    assert (await store.get('alice', future.future_id)) == replace(future, number=1)


async def test_operation_that_ran_before_a_kill_is_answered_from_the_record() -> None:
    """Its number was kept before it was sent, and is sent again."""
    trainer, store = RecordTrainer(), MemoryFutureStore()
    future = await accepted(store, 'one')
    assert await ExecuteOperation(trainer, store, PERSISTENCE)(future, b'one') == b'ran one'
    resumed = store.futures[future.future_id]
    assert await ExecuteOperation(trainer, store, PERSISTENCE)(resumed, b'one') == b'ran one'
    assert trainer.applied == [b'one']


async def test_number_that_went_to_another_is_replaced() -> None:
    """An operation whose number another caller used, or that is ahead of a service set back, gets the right one."""
    trainer, store = RecordTrainer(applied=[b'native'], told=[0, 7, 1]), MemoryFutureStore()
    future = await accepted(store, 'one')
    assert await ExecuteOperation(trainer, store, PERSISTENCE)(future, b'one') == b'ran one'
    assert trainer.applied == [b'native', b'one']
    assert store.futures[future.future_id].number == 2


async def test_refused_operation_leaves_its_number_to_the_next() -> None:
    """The lane goes on, and no number is skipped."""
    trainer, store = RecordTrainer(), MemoryFutureStore()
    execute = ExecuteOperation(trainer, store, PERSISTENCE)
    first, second = await accepted(store, 'one'), await accepted(store, 'two')
    # As if it had been killed then.
    number = await store.number(first, 1, instead_of=None)
    trainer.failures = [InvalidField('operation', 'is wrong')]
    with pytest.raises(InvalidField):
        await execute(replace(first, number=number), b'one')
    assert await execute(second, b'two') == b'ran two'
    assert trainer.applied == [b'two']


class SlowStore(MemoryFutureStore):
    """Gives numbers only once it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def number(self, future: Future, number: int, *, instead_of: int | None) -> int:
        """Keep the number when it is time."""
        self.asked.set()
        await self.gate.wait()
        return await super().number(future, number, instead_of=instead_of)


async def test_operation_cancelled_while_it_is_numbered_is_not_sent() -> None:
    """It ends as cancelled, and the next one takes its number."""
    trainer, store = RecordTrainer(), SlowStore()
    execute = ExecuteOperation(trainer, store, PERSISTENCE)
    first, second = await accepted(store, 'one'), await accepted(store, 'two')
    running = asyncio.create_task(execute(first, b'one'))
    await store.asked.wait()
    assert not await execute.stop(first)
    store.gate.set()
    with pytest.raises(Cancelled):
        await running
    assert await execute(second, b'two') == b'ran two'
    assert (trainer.applied, trainer.cancelled) == ([b'two'], [])


@pytest.mark.parametrize('is_numbered', [False, True], ids=['before its number', 'after it'])
async def test_operation_of_another_gateway_is_neither_numbered_nor_settled(is_numbered: bool) -> None:  # noqa: FBT001
    """A gateway that was taken for dead changes nothing about what another one carries out now."""
    trainer, store = RecordTrainer(), MemoryFutureStore()
    future = await accepted(store, 'one')
    if is_numbered:
        await store.number(future, 1, instead_of=None)
    taken = store.futures[future.future_id] = replace(store.futures[future.future_id], owner='gw-other')
    with pytest.raises(FutureTaken):
        await ExecuteOperation(trainer, store, PERSISTENCE)(future, b'one')
    assert (await store.settle(future.done(moment=future.create_time)), trainer.applied) == (taken, [])


async def test_adapter_is_made_once_through_an_outage() -> None:
    """The future's id makes the repeat harmless."""
    trainer, store = RecordTrainer(late_failures=list[DomainError](OUTAGE)), MemoryFutureStore()
    future = await accepted(store, 'one')
    assert await CreateAdapter(trainer, PERSISTENCE)(future, b'adapter') == b'adapter'
    assert trainer.created == {future.future_id: b'adapter'}


async def test_adapter_that_was_deleted_before_the_answer_was_lost_is_deleted() -> None:
    """A repeat that finds nothing has succeeded; a first attempt that finds nothing has not."""
    trainer, store = RecordTrainer(late_failures=[ServiceUnreachable('model')]), MemoryFutureStore()
    delete = DeleteAdapter(trainer, store, PERSISTENCE)
    future = await accepted(store, 'one')
    assert await delete(future, b'ad-1') == b''
    assert await delete(store.futures[future.future_id], b'ad-1') == b''
    with pytest.raises(AdapterNotFound):
        await delete(await accepted(store, 'two'), b'ad-1')


async def test_results_expire_and_files_of_nobody_are_swept() -> None:
    """A result goes when it is old, what waits and what is young stays; later it is as if there had been none."""
    clock = FakeClock()
    payloads = MemoryPayloadStore(clock)
    async with running_desk(stores=(MemoryFutureStore(), payloads)) as desk:
        expire = ExpireFutures(
            desk.store, payloads, results_for=timedelta(hours=6), records_for=timedelta(days=7), clock=clock
        )
        future = await desk.submit('one')
        assert await desk.outcome(future) == b'eno'
        desk.recorder.gate.clear()
        waiting = await desk.submit('two')
        await payloads.put('fu-nobody-1.request', b'of a process that was killed')
        clock.advance(timedelta(hours=5))
        assert await expire() == 0
        assert payloads.kept.keys() == {future.result_name, waiting.payload_name}
        clock.advance(timedelta(hours=2))
        assert await expire() == 1
        assert payloads.kept.keys() == {waiting.payload_name}
        with pytest.raises(FutureExpired):
            await desk.verbs.wait(future.future_id, seconds=0)
        clock.advance(timedelta(days=7))
        assert await expire() == 0
        with pytest.raises(FutureNotFound):
            await desk.verbs.wait(future.future_id, seconds=0)
        desk.recorder.gate.set()
        assert await desk.outcome(waiting) == b'owt'
