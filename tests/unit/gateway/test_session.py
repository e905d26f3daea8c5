"""Sessions: expiry is a view of time, finishing is for good."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from services.gateway.domain.errors import SessionFinished
from services.gateway.domain.session import FinishReason, Session, SessionState

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
