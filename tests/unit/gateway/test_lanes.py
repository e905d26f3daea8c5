"""The order of a lane, whatever comes in whatever order; and fair turns. Pure rules, so many examples."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import FutureNotFound
from services.gateway.futures.lane import Lane, Place
from services.gateway.futures.room import Room
from services.gateway.futures.rules import Bounds, Future, FutureRequest
from services.kit.errors import DeadlinePassed, QueueFull, ServiceUnreachable

START = datetime(2026, 1, 1, tzinfo=UTC)
PATIENCE = 10.0


def future_at(position: int, *, key: str = '', tenant: str = 'alice') -> Future:
    """Return a future of the lane."""
    order = FutureRequest(
        kind='x', key=key or f'k{position}', payload=b'', session_id='', lane='ad-1', position=position
    )
    return Future.accepted(order, tenant_id=tenant, moment=START)


@given(arrivals=st.lists(st.integers(0, 12), max_size=30), ends=st.lists(st.booleans(), max_size=60))
def test_lane_runs_each_position_once_and_in_order(arrivals: list[int], ends: list[bool]) -> None:
    """Whatever order positions come in, as often as they come, and whenever the one that runs ends."""
    lane, ran = Lane(now=0.0), list[int]()
    moves = iter(ends)
    for position in arrivals:
        place = lane.add(future_at(position), now=0.0)
        assert (place is Place.PASSED) == (position < len(ran) - lane.is_running)
        while (begun := lane.begin()) is not None:
            ran.append(begun.position)
            assert lane.begin() is None
            if next(moves, True):
                lane.end(now=0.0)
    assert ran == list(range(len(ran)))
    if not lane.is_running:
        assert len(ran) not in arrivals


@given(present=st.sets(st.integers(0, 14)), start=st.integers(0, 3))
def test_lane_ends_every_future_that_comes_though_others_never_do(present: set[int], start: int) -> None:
    """Those right behind a gap fail together when it is given up, all others run; none is left, none ends twice."""
    lane, now = Lane(start, now=0.0), 0.0
    ran, failed = list[int](), list[int]()
    for position in sorted(present, reverse=True):
        if lane.add(future_at(position), now=now) is Place.PASSED:
            assert position < start
    while lane.waiting_count:
        if (begun := lane.begin()) is not None:
            ran.append(begun.position)
        else:
            end = lane.gap_ends(PATIENCE)
            assert end is not None
            assert end >= now
            missing, now = lane.next_position, end
            given_up = [future.position for future in lane.give_up()]
            assert missing not in present
            assert given_up == list(range(given_up[0], given_up[-1] + 1))
            failed += given_up
        lane.end(now=now)
    assert sorted(ran + failed) == sorted(position for position in present if position >= start)
    assert (ran + failed) == sorted(ran) + sorted(failed)
    expected = start
    while expected in present:
        expected += 1
    assert ran == list(range(start, expected))


def test_lane_takes_one_future_at_each_position() -> None:
    """The first one has it; the same again is known, whether it waits or runs; another one has been passed."""
    lane = Lane(now=0.0)
    assert lane.add(future_at(0), now=0.0) is Place.TAKEN
    assert lane.add(future_at(0), now=0.0) is Place.KNOWN
    assert lane.add(future_at(0, key='other'), now=0.0) is Place.PASSED
    assert lane.begin() is not None
    assert lane.add(future_at(0), now=0.0) is Place.KNOWN
    assert lane.add(future_at(0, key='other'), now=0.0) is Place.PASSED


def test_gap_is_waited_for_from_when_the_lane_fell_idle() -> None:
    """Neither while something runs nor before the first one in waiting came."""
    lane = Lane(now=0.0)
    assert lane.gap_ends(PATIENCE) is None
    assert lane.idle_since() == 0.0
    lane.add(future_at(0), now=1.0)
    assert lane.gap_ends(PATIENCE) is None
    lane.begin()
    lane.add(future_at(2), now=2.0)
    assert lane.gap_ends(PATIENCE) is None
    lane.end(now=5.0)
    assert lane.gap_ends(PATIENCE) == 15.0
    lane.add(future_at(3), now=9.0)
    assert lane.gap_ends(PATIENCE) == 15.0
    assert lane.idle_since() is None


def test_room_counts_each_future_once() -> None:
    """However many hold it, and until the last one leaves; those accepted before are counted and never refused."""
    room = Room(Bounds(per_tenant=1, total=2))
    room.enter_anyway(future_at(0))
    room.enter_anyway(future_at(0))
    for future in (future_at(1), future_at(2)):
        assert _is_refused(room, future)
    room.enter(future_at(0, tenant='bob'))
    assert _is_refused(room, future_at(0, tenant='carol'))
    room.leave(future_at(0))
    assert _is_refused(room, future_at(1))
    room.leave(future_at(0))
    room.leave(future_at(0))
    room.enter(future_at(0, tenant='carol'))
    assert _is_refused(room, future_at(1))


def test_room_bounds_bytes_of_each_tenant_and_of_all() -> None:
    """Bytes are counted once for each future, and there is room for them again when it leaves."""
    room = Room(Bounds(per_tenant=9, total=9), sizes=Bounds(per_tenant=10, total=15))
    room.enter(future_at(0), 8)
    room.enter(future_at(0), 8)
    assert room.size_bytes(future_at(0)) == 8
    assert _is_refused(room, future_at(1), 3)
    room.enter(future_at(1), 2)
    assert _is_refused(room, future_at(0, tenant='bob'), 6)
    room.enter(future_at(0, tenant='bob'), 5)
    room.leave(future_at(0))
    assert _is_refused(room, future_at(2), 1)
    room.leave(future_at(0))
    room.enter(future_at(2), 8)
    assert room.size_bytes(future_at(0)) == 0


def _is_refused(room: Room, future: Future, size_bytes: int = 0) -> bool:
    try:
        room.enter(future, size_bytes)
    except QueueFull:
        return True
    return False


def test_busy_or_absent_services_are_waited_for() -> None:
    """Failures of a service that is away or busy are transient; those of an invalid request are not."""
    failures = (ServiceUnreachable('model'), DeadlinePassed(), QueueFull(1, 1))
    assert all(error.disposition.is_transient for error in failures)
    assert not FutureNotFound('x').disposition.is_transient
