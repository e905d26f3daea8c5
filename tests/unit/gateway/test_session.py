"""Sessions: expiry is a view of time, finishing is for good."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from services.gateway.errors import SessionFinished
from services.gateway.sessions.session import FinishReason, Session, SessionState

START = datetime(2026, 5, 1, tzinfo=UTC)
LIFETIME = timedelta(minutes=5)
SESSION = Session(
    session_id='ses-1',
    tenant_id='alice',
    request_id='rq-1',
    state=SessionState.ACTIVE,
    client='test',
    create_time=START,
    heartbeat_time=START,
)


def test_silent_session_is_expired_after_its_lifetime() -> None:
    """At the lifetime's end it still lives; just after, it does not."""
    assert SESSION.as_of(START + LIFETIME, lifetime=LIFETIME).state is SessionState.ACTIVE
    late = START + LIFETIME + timedelta(microseconds=1)
    assert SESSION.as_of(late, lifetime=LIFETIME).state is SessionState.EXPIRED


def test_heartbeat_brings_an_expired_session_back() -> None:
    """It is active from the heartbeat on, and a late heartbeat does not turn time back."""
    expired = replace(SESSION, state=SessionState.EXPIRED)
    back = expired.heard(START + timedelta(hours=1))
    assert (back.state, back.heartbeat_time) == (SessionState.ACTIVE, START + timedelta(hours=1))
    assert back.heard(START).heartbeat_time == START + timedelta(hours=1)


def test_finished_session_stays_finished() -> None:
    """The first reason told stays, no heartbeat is taken, and it never expires."""
    finished = SESSION.finished(FinishReason.FAILED)
    assert finished.finished(FinishReason.SUCCESS) == finished
    assert finished.as_of(START + timedelta(days=9), lifetime=LIFETIME) == finished
    with pytest.raises(SessionFinished):
        finished.heard(START)


def test_a_session_is_settled_as_it_ended_and_no_other_way() -> None:
    """One that came back, or said that it was done, while it was looked after has its own end to come."""
    expired = replace(SESSION, state=SessionState.EXPIRED)
    settled = expired.settled(expired, ['twinkle://a/weights/b'])
    assert (settled.is_settled, settled.checkpoint_paths) == (True, ('twinkle://a/weights/b',))
    back = expired.heard(START + timedelta(hours=1))
    assert back.settled(expired, ['x']) == back
    again = replace(back, state=SessionState.EXPIRED)
    assert again.settled(expired, ['x']) == again
    finished = expired.finished(FinishReason.SUCCESS)
    assert finished.settled(expired, ['x']) == finished


def test_what_ends_again_is_to_be_settled_again() -> None:
    """What was saved before is still told meanwhile."""
    expired = replace(SESSION, state=SessionState.EXPIRED)
    settled = expired.settled(expired, ['x'])
    for ended in (settled.heard(START), settled.finished(FinishReason.FAILED)):
        assert (ended.is_settled, ended.checkpoint_paths) == (False, ('x',))
    assert settled.finished(FinishReason.FAILED).finished(FinishReason.SUCCESS).finish_reason is FinishReason.FAILED


def test_only_success_leaves_unsaved_steps_unsaved() -> None:
    """A client that failed, was interrupted or fell silent may want them."""
    assert SESSION.is_saved
    saved = {reason: SESSION.finished(reason).is_saved for reason in FinishReason}
    assert saved == {FinishReason.SUCCESS: False, FinishReason.FAILED: True, FinishReason.INTERRUPTED: True}
