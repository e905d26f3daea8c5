"""Rules of sessions: expiry, heartbeats, finishing and settlement."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from twinkle_services.gateway.errors import SessionFinished
from twinkle_services.gateway.sessions.rules import FinishReason, Session, SessionState

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
    """A session is active until its lifetime has passed, and expired right after that."""
    assert SESSION.as_of(START + LIFETIME, lifetime=LIFETIME).state is SessionState.ACTIVE
    late = START + LIFETIME + timedelta(microseconds=1)
    assert SESSION.as_of(late, lifetime=LIFETIME).state is SessionState.EXPIRED


def test_heartbeat_revives_an_expired_session() -> None:
    """A heartbeat makes an expired session active, and an older heartbeat does not reduce the heartbeat time."""
    expired = replace(SESSION, state=SessionState.EXPIRED)
    revived = expired.with_heartbeat(START + timedelta(hours=1))
    assert (revived.state, revived.heartbeat_time) == (SessionState.ACTIVE, START + timedelta(hours=1))
    assert revived.with_heartbeat(START).heartbeat_time == START + timedelta(hours=1)


def test_finished_session_stays_finished() -> None:
    """A finished session keeps its first reason, refuses heartbeats and never expires."""
    finished = SESSION.finished(FinishReason.FAILED)
    assert finished.finished(FinishReason.SUCCESS) == finished
    assert finished.as_of(START + timedelta(days=9), lifetime=LIFETIME) == finished
    with pytest.raises(SessionFinished):
        finished.with_heartbeat(START)


def test_settlement_applies_only_to_the_same_expiry() -> None:
    """A session that was revived or finished during its settlement is returned unchanged."""
    expired = replace(SESSION, state=SessionState.EXPIRED)
    settled = expired.settled(expired, ['twinkle://a/weights/b'])
    assert (settled.is_settled, settled.checkpoint_paths) == (True, ('twinkle://a/weights/b',))
    revived = expired.with_heartbeat(START + timedelta(hours=1))
    assert revived.settled(expired, ['x']) == revived
    again = replace(revived, state=SessionState.EXPIRED)
    assert again.settled(expired, ['x']) == again
    finished = expired.finished(FinishReason.SUCCESS)
    assert finished.settled(expired, ['x']) == finished


def test_revived_or_finished_session_is_settled_again() -> None:
    """A revived or finished session is unsettled, and keeps its checkpoint paths until it is settled again."""
    expired = replace(SESSION, state=SessionState.EXPIRED)
    settled = expired.settled(expired, ['x'])
    for changed in (settled.with_heartbeat(START), settled.finished(FinishReason.FAILED)):
        assert (changed.is_settled, changed.checkpoint_paths) == (False, ('x',))
    assert settled.finished(FinishReason.FAILED).finished(FinishReason.SUCCESS).finish_reason is FinishReason.FAILED


def test_unsaved_steps_are_saved_unless_the_client_reports_success() -> None:
    """Steps are saved if the client failed, was interrupted or sent no heartbeats, but not after a success."""
    assert SESSION.is_saved
    saved = {reason: SESSION.finished(reason).is_saved for reason in FinishReason}
    assert saved == {FinishReason.SUCCESS: False, FinishReason.FAILED: True, FinishReason.INTERRUPTED: True}
