"""What the verbs of futures promise, over fakes."""

import asyncio
from datetime import timedelta

import pytest

from fixtures.futures import Recorder, running_desk
from services.gateway.errors import FutureExpired, FutureNotFound, PositionMissing, PositionPassed
from services.gateway.futures.rules import Bounds, Future, FutureRequest, FutureState, future_id_of
from services.kit.errors import (
    Cancelled,
    Draining,
    Internal,
    InvalidField,
    NotSupportedHere,
    QueueFull,
    RequestIdReused,
)

SHORT = timedelta(milliseconds=20)


async def test_future_is_accepted_carried_out_and_told() -> None:
    """The acknowledgement comes at once, the outcome when it is ready, as often as it is asked for."""
    async with running_desk() as desk:
        desk.recorder.gate.clear()
        future = await desk.submit('one', note='{"verb": "x"}')
        assert future.state is FutureState.WAITING
        assert future.future_id == future_id_of('alice', 'one')
        assert await desk.verbs.payload(future) == b'one'
        assert (await desk.verbs.wait(future.future_id, seconds=0)).state is FutureState.WAITING
        desk.recorder.gate.set()
        assert await desk.outcome(future) == b'eno'
        assert await desk.outcome(future) == b'eno'
        assert (await desk.verbs.wait(future.future_id, seconds=0)).note == '{"verb": "x"}'


async def test_repeat_is_the_same_future_and_other_content_is_refused() -> None:
    """Neither runs twice, before or after the first is finished, and the first keeps its request."""
    async with running_desk() as desk:
        desk.recorder.gate.clear()
        first = await desk.submit('one')
        assert await desk.submit('one') == first
        with pytest.raises(RequestIdReused):
            await desk.submit('one', payload=b'other')
        desk.recorder.gate.set()
        assert await desk.outcome(first) == b'eno'
        assert (await desk.submit('one')).state is FutureState.DONE
        with pytest.raises(RequestIdReused):
            await desk.submit('one', payload=b'other')
        assert desk.recorder.begun == ['one']


async def test_repeats_at_the_same_time_run_once() -> None:
    """However many come before the first is durable."""
    async with running_desk() as desk:
        futures = await asyncio.gather(*(desk.submit('one', lane='ad-1') for _ in range(20)))
        assert {await desk.outcome(future) for future in futures} == {b'eno'}
        assert desk.recorder.begun == ['one']


async def test_another_tenants_future_is_like_an_absent_one() -> None:
    """It can be neither waited for nor cancelled, and the same key is another future."""
    async with running_desk() as desk:
        future = await desk.submit('one')
        desk.acting_as('bob')
        for ask in (desk.verbs.wait(future.future_id, seconds=1), desk.verbs.cancel(future.future_id)):
            with pytest.raises(FutureNotFound):
                await ask
        assert (await desk.submit('one')).future_id != future.future_id


@pytest.mark.parametrize(
    ('raised', 'kept'),
    [(InvalidField('a', 'b'), InvalidField), (ValueError('a defect'), Internal)],
    ids=['a fact', 'a defect'],
)
async def test_failure_is_kept(raised: BaseException, kept: type) -> None:
    """A future whose executor raises has failed for good, whatever it was; those behind it go on."""
    async with running_desk(Recorder(failures={'one': raised})) as desk:
        first = await desk.submit('one', lane='ad-1', position=0)
        second = await desk.submit('two', lane='ad-1', position=1)
        assert isinstance(await desk.outcome(first), kept)
        assert await desk.outcome(second) == b'owt'


async def test_kind_that_nobody_carries_out_fails() -> None:
    """It is told, not kept waiting."""
    async with running_desk() as desk:
        assert isinstance(await desk.outcome(await desk.submit('one', kind='unknown')), NotSupportedHere)


async def test_lane_runs_in_order_whatever_order_it_comes_in() -> None:
    """The next one begins when the one before is settled, so at most one of a lane runs."""
    async with running_desk() as desk:
        futures = [await desk.submit(f'k{n}', lane='ad-1', position=n) for n in (3, 1, 2, 0, 4)]
        assert [await desk.outcome(future) for future in futures] == [b'3k', b'1k', b'2k', b'0k', b'4k']
        assert desk.recorder.begun == ['k0', 'k1', 'k2', 'k3', 'k4']
        assert desk.recorder.most['alice'] == 1


async def test_position_that_never_comes_fails_those_that_follow_it() -> None:
    """The ones right behind the gap fail and name it; the lane goes on, and what comes late has been passed."""
    async with running_desk(patience=SHORT) as desk:
        assert await desk.outcome(await desk.submit('k0', lane='ad-1', position=0)) == b'0k'
        behind = [await desk.submit(f'k{n}', lane='ad-1', position=n) for n in (2, 3)]
        for future in behind:
            error = await desk.outcome(future)
            assert isinstance(error, PositionMissing)
            assert error.missing == 1
        assert await desk.outcome(await desk.submit('k4', lane='ad-1', position=4)) == b'4k'
        assert isinstance(await desk.outcome(await desk.submit('k1', lane='ad-1', position=1)), PositionPassed)
        assert desk.recorder.begun == ['k0', 'k4']


async def test_position_that_another_gateway_finished_is_not_missed() -> None:
    """Before a gap is given up, the lane is read again: what follows a position finished elsewhere runs."""
    async with running_desk(patience=SHORT) as desk:
        behind = await desk.submit('k1', lane='ad-1', position=1)
        order = FutureRequest(kind='record', key='k0', payload=b'k0', session_id='', lane='ad-1')
        first = Future.accepted(order, tenant_id='alice', moment=desk.clock.now())
        await desk.store.add_if_absent(first)
        await desk.store.settle(first.done(moment=desk.clock.now()))
        assert await desk.outcome(behind) == b'1k'


async def test_position_is_not_missed_while_another_one_runs() -> None:
    """Patience begins when the lane falls idle: a long operation before a gap costs nobody anything."""
    async with running_desk(patience=SHORT) as desk:
        desk.recorder.gate.clear()
        first = await desk.submit('k0', lane='ad-1', position=0)
        third = await desk.submit('k2', lane='ad-1', position=2)
        assert not (await desk.verbs.wait(third.future_id, seconds=0.1)).is_finished
        second = await desk.submit('k1', lane='ad-1', position=1)
        desk.recorder.gate.set()
        assert [await desk.outcome(future) for future in (first, second, third)] == [b'0k', b'1k', b'2k']


async def test_what_waited_is_resumed_with_its_order() -> None:
    """Another process over the same stores runs what the first one left, once each, lanes in order."""
    stuck = Recorder()
    stuck.gate.clear()
    async with running_desk(stuck) as desk:
        futures = [await desk.submit(f'k{n}', lane='ad-1', position=n) for n in (2, 0, 1)]
        futures.append(await desk.submit('free'))
        await desk.verbs.wait(futures[-1].future_id, seconds=0.01)
    async with running_desk(stores=(desk.store, desk.payloads)) as again:
        assert [await again.outcome(future) for future in futures] == [b'2k', b'0k', b'1k', b'eerf']
        assert [key for key in again.recorder.begun if key != 'free'] == ['k0', 'k1', 'k2']
        late = await again.submit('k3', lane='ad-1', position=3)
        assert await again.outcome(late) == b'3k'


async def test_request_is_dropped_once_it_is_finished() -> None:
    """Only the result stays, and what asks for the request is told that it expired."""
    async with running_desk() as desk:
        future = await desk.submit('one')
        await desk.outcome(future)
        await desk.payloads.has_dropped(future.payload_name)
        assert set(desk.payloads.kept) == {future.result_name}
        with pytest.raises(FutureExpired):
            await desk.verbs.payload(future)


async def test_unordered_futures_share_places_between_tenants() -> None:
    """A tenant with a thousand waiting holds up another's no longer than one turn, and has no more than its places."""
    places = Bounds(per_tenant=3, total=5)
    async with running_desk(unordered=places) as desk:
        desk.recorder.gate.clear()
        many = [await desk.submit(f'a{n}') for n in range(1000)]
        desk.acting_as('bob')
        few = [await desk.submit(f'b{n}') for n in range(2)]
        desk.recorder.gate.set()
        for future in few:
            await desk.outcome(future)
        assert len(desk.recorder.begun) < 20
        desk.acting_as('alice')
        for future in many:
            await desk.outcome(future)
        assert desk.recorder.most['alice'] == places.per_tenant
        assert len(desk.recorder.begun) == 1002


async def test_what_is_beyond_the_room_is_refused() -> None:
    """A tenant beyond its share is told so, others not; a place is free again when a future is finished."""
    async with running_desk(room=Bounds(per_tenant=2, total=3)) as desk:
        desk.recorder.gate.clear()
        first = [await desk.submit('a0'), await desk.submit('a1')]
        with pytest.raises(QueueFull):
            await desk.submit('a2')
        assert await desk.submit('a1') == first[1]
        desk.acting_as('bob')
        await desk.submit('b0')
        with pytest.raises(QueueFull):
            await desk.submit('b1')
        desk.acting_as('alice')
        desk.recorder.gate.set()
        assert [await desk.outcome(future) for future in first] == [b'0a', b'1a']
        assert await desk.outcome(await desk.submit('a2')) == b'2a'


async def test_cancelled_futures_end_where_that_can_be_done() -> None:
    """One that waits or may be cut off ends as cancelled; one of a lane is passed over; a finished one stays."""
    async with running_desk(unordered=Bounds(per_tenant=1, total=1)) as desk:
        desk.recorder.gate.clear()
        running, waiting = await desk.submit('one'), await desk.submit('two')
        lane = [await desk.submit(f'k{n}', lane='ad-1', position=n) for n in range(3)]
        await desk.recorder.has_begun(2)
        for future in (waiting, running, lane[1]):
            await desk.verbs.cancel(future.future_id)
        assert isinstance(await desk.outcome(waiting), Cancelled)
        assert isinstance(await desk.outcome(running), Cancelled)
        desk.recorder.gate.set()
        assert isinstance(await desk.outcome(lane[1]), Cancelled)
        assert [await desk.outcome(lane[0]), await desk.outcome(lane[2])] == [b'0k', b'2k']
        await desk.verbs.cancel(lane[0].future_id)
        assert await desk.outcome(lane[0]) == b'0k'


async def test_executor_that_must_not_be_cut_off_is_not() -> None:
    """Its future ends as it would have ended."""
    async with running_desk(Recorder(is_interruptible=False)) as desk:
        desk.recorder.gate.clear()
        future = await desk.submit('one')
        await desk.recorder.has_begun(1)
        await desk.verbs.cancel(future.future_id)
        desk.recorder.gate.set()
        assert await desk.outcome(future) == b'eno'


async def test_gateway_that_stops_lets_nobody_wait_and_accepts_nothing() -> None:
    """Who waits is answered at once with the future as it is, and it is resumed later."""
    async with running_desk() as desk:
        desk.recorder.gate.clear()
        future = await desk.submit('one')
        waiting = asyncio.create_task(desk.verbs.wait(future.future_id, seconds=60))
        await asyncio.sleep(0)
        await desk.verbs.close()
        assert (await waiting).state is FutureState.WAITING
        with pytest.raises(Draining):
            await desk.submit('two')
        assert (await desk.store.get('alice', future.future_id)).state is FutureState.WAITING
