"""Operations on futures, over stores in memory."""

import asyncio
from datetime import timedelta

import pytest

from fixtures.future_stores import MemoryFutureStore, MemoryPayloadStore
from fixtures.futures import Recorder, running_futures
from twinkle_services.gateway.errors import FutureExpired, FutureNotFound, PositionMissing, PositionPassed
from twinkle_services.gateway.futures.rules import Bounds, Future, FutureRequest, FutureState, future_id_of
from twinkle_services.kit.errors import (
    Cancelled,
    DiskFull,
    Draining,
    Internal,
    InvalidField,
    NotSupportedHere,
    QueueFull,
    RequestIdReused,
    ServiceUnreachable,
)

SHORT = timedelta(milliseconds=20)


async def test_future_is_accepted_run_and_returned() -> None:
    """A request is acknowledged at once; once its outcome is ready, the outcome can be fetched repeatedly."""
    async with running_futures() as gateway:
        gateway.recorder.gate.clear()
        future = await gateway.submit('one', note='{"verb": "x"}')
        assert future.state is FutureState.WAITING
        assert future.future_id == future_id_of('alice', 'one')
        assert await gateway.futures.payload(future) == b'one'
        assert (await gateway.futures.wait(future.future_id, seconds=0)).state is FutureState.WAITING
        gateway.recorder.gate.set()
        assert await gateway.outcome(future) == b'eno'
        assert await gateway.outcome(future) == b'eno'
        assert (await gateway.futures.wait(future.future_id, seconds=0)).note == '{"verb": "x"}'


async def test_repeat_returns_the_same_future_and_other_content_is_refused() -> None:
    """A request that is repeated before or after its end runs once; other content with its key is refused."""
    async with running_futures() as gateway:
        gateway.recorder.gate.clear()
        first = await gateway.submit('one')
        assert await gateway.submit('one') == first
        with pytest.raises(RequestIdReused):
            await gateway.submit('one', payload=b'other')
        gateway.recorder.gate.set()
        assert await gateway.outcome(first) == b'eno'
        assert (await gateway.submit('one')).state is FutureState.DONE
        with pytest.raises(RequestIdReused):
            await gateway.submit('one', payload=b'other')
        assert gateway.recorder.started == ['one']


async def test_request_that_does_not_fit_on_the_disk_is_refused() -> None:
    """A request above the free space is refused without a future or a payload; with enough space, it is accepted."""
    store, payloads = MemoryFutureStore(), MemoryPayloadStore()
    async with running_futures(stores=(store, payloads)) as gateway:
        payloads.free_bytes = 2
        with pytest.raises(DiskFull) as refused:
            await gateway.submit('one')
        assert (refused.value.free_bytes, refused.value.needed_bytes) == (2, 3)
        assert (payloads.kept, store.futures) == ({}, {})
        payloads.free_bytes = 3
        assert await gateway.outcome(await gateway.submit('one')) == b'eno'


async def test_concurrent_repeats_run_once() -> None:
    """Concurrent equal requests share one future, which runs once."""
    async with running_futures() as gateway:
        futures = await asyncio.gather(*(gateway.submit('one', lane='ad-1') for _ in range(20)))
        assert {await gateway.outcome(future) for future in futures} == {b'eno'}
        assert gateway.recorder.started == ['one']


async def test_future_of_another_tenant_is_not_found() -> None:
    """Another tenant cannot wait for a future or cancel it; the same key of another tenant names another future."""
    async with running_futures() as gateway:
        future = await gateway.submit('one')
        gateway.acting_as('bob')
        for call in (gateway.futures.wait(future.future_id, seconds=1), gateway.futures.cancel(future.future_id)):
            with pytest.raises(FutureNotFound):
                await call
        assert (await gateway.submit('one')).future_id != future.future_id


@pytest.mark.parametrize(
    ('raised', 'stored'),
    [(InvalidField('a', 'b'), InvalidField), (ValueError('a defect'), Internal)],
    ids=['domain error', 'defect'],
)
async def test_failure_is_final(raised: BaseException, stored: type) -> None:
    """A future whose executor raises any error fails, and later futures still run."""
    async with running_futures(Recorder(failures={'one': raised})) as gateway:
        first = await gateway.submit('one', lane='ad-1', position=0)
        second = await gateway.submit('two', lane='ad-1', position=1)
        assert isinstance(await gateway.outcome(first), stored)
        assert await gateway.outcome(second) == b'owt'


async def test_unknown_kind_fails() -> None:
    """A future of a kind without an executor fails instead of waiting."""
    async with running_futures() as gateway:
        assert isinstance(await gateway.outcome(await gateway.submit('one', kind='unknown')), NotSupportedHere)


async def test_lane_runs_in_order_of_positions() -> None:
    """A lane runs one future at a time in the order of positions, for any order of arrival."""
    async with running_futures() as gateway:
        futures = [await gateway.submit(f'k{n}', lane='ad-1', position=n) for n in (3, 1, 2, 0, 4)]
        assert [await gateway.outcome(future) for future in futures] == [b'3k', b'1k', b'2k', b'0k', b'4k']
        assert gateway.recorder.started == ['k0', 'k1', 'k2', 'k3', 'k4']
        assert gateway.recorder.peak['alice'] == 1


async def test_missing_position_fails_the_futures_behind_it() -> None:
    """Futures after a gap fail, and the error names the missing position; a late future for it is refused."""
    async with running_futures(patience=SHORT) as gateway:
        assert await gateway.outcome(await gateway.submit('k0', lane='ad-1', position=0)) == b'0k'
        behind = [await gateway.submit(f'k{n}', lane='ad-1', position=n) for n in (2, 3)]
        for future in behind:
            error = await gateway.outcome(future)
            assert isinstance(error, PositionMissing)
            assert error.missing == 1
        assert await gateway.outcome(await gateway.submit('k4', lane='ad-1', position=4)) == b'4k'
        assert isinstance(await gateway.outcome(await gateway.submit('k1', lane='ad-1', position=1)), PositionPassed)
        assert gateway.recorder.started == ['k0', 'k4']


async def test_position_that_another_gateway_finished_is_not_missing() -> None:
    """The lane is read again before futures fail, so a position that another gateway finished is not missing."""
    async with running_futures(patience=SHORT) as gateway:
        behind = await gateway.submit('k1', lane='ad-1', position=1)
        request = FutureRequest(kind='record', key='k0', payload=b'k0', session_id='', lane='ad-1')
        first = Future.accepted(request, tenant_id='alice', moment=gateway.clock.now())
        await gateway.store.add_if_absent(first)
        await gateway.store.settle(first.done(moment=gateway.clock.now()))
        assert await gateway.outcome(behind) == b'1k'


async def test_position_is_not_missing_while_another_one_runs() -> None:
    """The wait for a missing position starts when the lane is idle, and not during a long operation."""
    async with running_futures(patience=SHORT) as gateway:
        gateway.recorder.gate.clear()
        first = await gateway.submit('k0', lane='ad-1', position=0)
        third = await gateway.submit('k2', lane='ad-1', position=2)
        assert not (await gateway.futures.wait(third.future_id, seconds=0.1)).is_finished
        second = await gateway.submit('k1', lane='ad-1', position=1)
        gateway.recorder.gate.set()
        assert [await gateway.outcome(future) for future in (first, second, third)] == [b'0k', b'1k', b'2k']


async def test_waiting_futures_are_resumed_in_order() -> None:
    """Another process with the same stores runs each unfinished future once, and a lane's futures in order."""
    stuck = Recorder()
    stuck.gate.clear()
    async with running_futures(stuck) as gateway:
        futures = [await gateway.submit(f'k{n}', lane='ad-1', position=n) for n in (2, 0, 1)]
        futures.append(await gateway.submit('free'))
        await gateway.futures.wait(futures[-1].future_id, seconds=0.01)
    async with running_futures(stores=(gateway.store, gateway.payloads)) as again:
        assert [await again.outcome(future) for future in futures] == [b'2k', b'0k', b'1k', b'eerf']
        assert [key for key in again.recorder.started if key != 'free'] == ['k0', 'k1', 'k2']
        late = await again.submit('k3', lane='ad-1', position=3)
        assert await again.outcome(late) == b'3k'


async def test_request_is_deleted_once_it_is_finished() -> None:
    """Only the result of a finished future is stored; its request is reported as expired."""
    async with running_futures() as gateway:
        future = await gateway.submit('one')
        await gateway.outcome(future)
        await gateway.payloads.has_dropped(future.payload_name)
        assert set(gateway.payloads.kept) == {future.result_name}
        with pytest.raises(FutureExpired):
            await gateway.futures.payload(future)


async def test_unordered_futures_share_slots_between_tenants() -> None:
    """A tenant with a thousand futures uses at most its slots, so another tenant is served too."""
    bounds = Bounds(per_tenant=3, total=5)
    async with running_futures(unordered=bounds) as gateway:
        gateway.recorder.gate.clear()
        many = [await gateway.submit(f'a{n}') for n in range(1000)]
        gateway.acting_as('bob')
        few = [await gateway.submit(f'b{n}') for n in range(2)]
        gateway.recorder.gate.set()
        for future in few:
            await gateway.outcome(future)
        assert len(gateway.recorder.started) < 20
        gateway.acting_as('alice')
        for future in many:
            await gateway.outcome(future)
        assert gateway.recorder.peak['alice'] == bounds.per_tenant
        assert len(gateway.recorder.started) == 1002


async def test_request_beyond_the_capacity_is_refused() -> None:
    """A request over the capacity of its tenant or the gateway is refused; a finished future frees capacity."""
    async with running_futures(capacity=Bounds(per_tenant=2, total=3)) as gateway:
        gateway.recorder.gate.clear()
        first = [await gateway.submit('a0'), await gateway.submit('a1')]
        with pytest.raises(QueueFull):
            await gateway.submit('a2')
        assert await gateway.submit('a1') == first[1]
        gateway.acting_as('bob')
        await gateway.submit('b0')
        with pytest.raises(QueueFull):
            await gateway.submit('b1')
        gateway.acting_as('alice')
        gateway.recorder.gate.set()
        assert [await gateway.outcome(future) for future in first] == [b'0a', b'1a']
        assert await gateway.outcome(await gateway.submit('a2')) == b'2a'


async def test_futures_are_cancelled_unless_they_are_finished() -> None:
    """A waiting or interruptible future is cancelled, a lane skips it, and a finished future keeps its result."""
    async with running_futures(unordered=Bounds(per_tenant=1, total=1)) as gateway:
        gateway.recorder.gate.clear()
        running, waiting = await gateway.submit('one'), await gateway.submit('two')
        lane = [await gateway.submit(f'k{n}', lane='ad-1', position=n) for n in range(3)]
        await gateway.recorder.has_started(2)
        for future in (waiting, running, lane[1]):
            await gateway.futures.cancel(future.future_id)
        assert isinstance(await gateway.outcome(waiting), Cancelled)
        assert isinstance(await gateway.outcome(running), Cancelled)
        gateway.recorder.gate.set()
        assert isinstance(await gateway.outcome(lane[1]), Cancelled)
        assert [await gateway.outcome(lane[0]), await gateway.outcome(lane[2])] == [b'0k', b'2k']
        await gateway.futures.cancel(lane[0].future_id)
        assert await gateway.outcome(lane[0]) == b'0k'


async def test_work_of_a_session_is_dropped() -> None:
    """Dropping a session's work cancels unfinished futures except deletions; another tenant's call has no effect."""
    async with running_futures(unordered=Bounds(per_tenant=1, total=1)) as gateway:
        gateway.recorder.gate.clear()
        gateway.futures.add_executor('delete_adapter', gateway.recorder, on_settled=lambda *_: None)
        running, waiting = await gateway.submit('one'), await gateway.submit('two')
        lane = [await gateway.submit(f'k{n}', lane='ad-1', position=n) for n in range(3)]
        deletion = await gateway.submit('bye', kind='delete_adapter')
        gateway.acting_as('bob')
        await gateway.futures.drop_session('ses-1')
        gateway.acting_as('alice')
        await gateway.recorder.has_started(2)
        await gateway.futures.drop_session('ses-1')
        for future in (running, waiting, *lane):
            assert isinstance(await gateway.outcome(future), Cancelled)
        gateway.recorder.gate.set()
        assert await gateway.outcome(deletion) == b'eyb'


class Unreachable(Recorder):
    """An executor that cannot stop the future `one`, because the model service does not respond."""

    async def stop(self, future: Future) -> bool:
        """Fail for the future `one`."""
        if future.key == 'one':
            raise ServiceUnreachable('model')
        return await super().stop(future)


async def test_all_futures_of_a_session_are_stopped_despite_an_error() -> None:
    """An error about one future of a session is raised after all other futures have been stopped."""
    async with running_futures(Unreachable()) as gateway:
        gateway.recorder.gate.clear()
        running = [await gateway.submit(name) for name in ('one', 'two', 'three')]
        await gateway.recorder.has_started(3)
        with pytest.raises(ServiceUnreachable):
            await gateway.futures.drop_session('ses-1')
        for future in running[1:]:
            assert isinstance(await gateway.outcome(future), Cancelled)
        gateway.recorder.gate.set()
        assert await gateway.outcome(running[0]) == b'eno'


async def test_uninterruptible_executor_completes() -> None:
    """A future of an uninterruptible executor finishes with its result despite a cancellation."""
    async with running_futures(Recorder(is_interruptible=False)) as gateway:
        gateway.recorder.gate.clear()
        future = await gateway.submit('one')
        await gateway.recorder.has_started(1)
        await gateway.futures.cancel(future.future_id)
        gateway.recorder.gate.set()
        assert await gateway.outcome(future) == b'eno'


async def test_closed_gateway_ends_waits_and_refuses_requests() -> None:
    """Closing returns the unfinished future to its waiter, refuses requests, and leaves the future waiting."""
    async with running_futures() as gateway:
        gateway.recorder.gate.clear()
        future = await gateway.submit('one')
        waiting = asyncio.create_task(gateway.futures.wait(future.future_id, seconds=60))
        await asyncio.sleep(0)
        await gateway.futures.close()
        assert (await waiting).state is FutureState.WAITING
        with pytest.raises(Draining):
            await gateway.submit('two')
        assert (await gateway.store.get('alice', future.future_id)).state is FutureState.WAITING


class UnreadableLanes(MemoryFutureStore):
    """Store that cannot read lanes while `is_unavailable` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_unavailable = True
        self.was_read = asyncio.Event()

    async def next_position(self, tenant_id: str, lane: str) -> int:
        """Return the next position, or fail while the store is unavailable."""
        if self.is_unavailable:
            self.was_read.set()
            raise ServiceUnreachable('database')
        return await super().next_position(tenant_id, lane)


async def test_stop_does_not_wait_for_the_database() -> None:
    """Closing refuses a request whose lane cannot be read, and the next process runs its future."""
    store, payloads = UnreadableLanes(), MemoryPayloadStore()
    async with running_futures(stores=(store, payloads)) as gateway:
        submitting = asyncio.create_task(gateway.submit('one', lane='ad-1'))
        await store.was_read.wait()
        async with asyncio.timeout(20):
            await gateway.futures.close()
        with pytest.raises(Draining):
            await submitting
    store.is_unavailable = False
    [stored] = store.futures.values()
    async with running_futures(stores=(store, payloads)) as after:
        assert await after.outcome(stored) == b'eno'
