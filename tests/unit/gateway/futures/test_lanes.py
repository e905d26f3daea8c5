"""Tests of the order in a lane, for any order of arrivals."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from twinkle_services.gateway.futures.lanes import Admission, Lane
from twinkle_services.gateway.futures.rules import Future, FutureRequest

START = datetime(2026, 1, 1, tzinfo=UTC)
PATIENCE = 10.0


def future_at(position: int, *, key: str = '', tenant: str = 'alice') -> Future:
    """Return a future at the given position of the lane."""
    request = FutureRequest(
        kind='x', key=key or f'k{position}', payload=b'', session_id='', lane='ad-1', position=position
    )
    return Future.accepted(request, tenant_id=tenant, moment=START)


@given(arrivals=st.lists(st.integers(0, 12), max_size=30), completions=st.lists(st.booleans(), max_size=60))
def test_lane_runs_each_position_once_and_in_order(arrivals: list[int], completions: list[bool]) -> None:
    """A lane runs each position once and in order, for any order of arrivals, repetitions and completions."""
    lane, ran = Lane(now=0.0), list[int]()
    is_completed = iter(completions)
    for position in arrivals:
        admission = lane.add(future_at(position), now=0.0)
        assert (admission is Admission.PASSED) == (position < len(ran) - lane.is_running)
        while (started := lane.start()) is not None:
            ran.append(started.position)
            assert lane.start() is None
            if next(is_completed, True):
                lane.end(now=0.0)
    assert ran == list(range(len(ran)))
    if not lane.is_running:
        assert len(ran) not in arrivals


@given(present=st.sets(st.integers(0, 14)), start=st.integers(0, 3))
def test_every_future_finishes_despite_missing_positions(present: set[int], start: int) -> None:
    """Futures before the first gap run, futures after a gap fail when the lane gives up, and each finishes once."""
    lane, now = Lane(start, now=0.0), 0.0
    ran, failed = list[int](), list[int]()
    for position in sorted(present, reverse=True):
        if lane.add(future_at(position), now=now) is Admission.PASSED:
            assert position < start
    while lane.idle_since() is None:
        if (started := lane.start()) is not None:
            ran.append(started.position)
        else:
            deadline = lane.gap_deadline(PATIENCE)
            assert deadline is not None
            assert deadline >= now
            missing, now = lane.next_position, deadline
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
    """Adding the same future again returns KNOWN; adding another future at its position returns PASSED."""
    lane = Lane(now=0.0)
    assert lane.add(future_at(0), now=0.0) is Admission.QUEUED
    assert lane.add(future_at(0), now=0.0) is Admission.KNOWN
    assert lane.add(future_at(0, key='other'), now=0.0) is Admission.PASSED
    assert lane.start() is not None
    assert lane.add(future_at(0), now=0.0) is Admission.KNOWN
    assert lane.add(future_at(0, key='other'), now=0.0) is Admission.PASSED


def test_wait_for_a_gap_starts_when_the_lane_is_idle() -> None:
    """The wait for a missing position starts when nothing runs and the first waiting future has arrived."""
    lane = Lane(now=0.0)
    assert lane.gap_deadline(PATIENCE) is None
    assert lane.idle_since() == 0.0
    lane.add(future_at(0), now=1.0)
    assert lane.gap_deadline(PATIENCE) is None
    lane.start()
    lane.add(future_at(2), now=2.0)
    assert lane.gap_deadline(PATIENCE) is None
    lane.end(now=5.0)
    assert lane.gap_deadline(PATIENCE) == 15.0
    lane.add(future_at(3), now=9.0)
    assert lane.gap_deadline(PATIENCE) == 15.0
    assert lane.idle_since() is None
