"""Converts messages of the session contract, with every check of their fields."""

from collections.abc import Mapping

from services.gateway.keys.convert import project_id_from_proto
from services.gateway.sessions.rules import FinishReason, Session, SessionRequest, SessionState
from services.kit.errors import InvalidField
from services.kit.rpc.fields import id_from_proto, text_from_proto, timestamp_to_proto
from twinkle.api.gateway.v1 import session_service_pb2 as messages

MAX_LABEL_LENGTH = 256
MAX_LABELS = 64
MAX_LABEL_VALUE_LENGTH = 4096

_STATES: Mapping[SessionState, messages.SessionState.ValueType] = {
    SessionState.ACTIVE: messages.SESSION_STATE_ACTIVE,
    SessionState.FINISHED: messages.SESSION_STATE_FINISHED,
    SessionState.EXPIRED: messages.SESSION_STATE_EXPIRED,
}
_FINISH_REASONS: Mapping[messages.FinishReason.ValueType, FinishReason] = {
    messages.FINISH_REASON_UNSPECIFIED: FinishReason.SUCCESS,
    messages.FINISH_REASON_SUCCESS: FinishReason.SUCCESS,
    messages.FINISH_REASON_FAILED: FinishReason.FAILED,
    messages.FINISH_REASON_INTERRUPTED: FinishReason.INTERRUPTED,
}


def session_request_from_proto(request: messages.CreateSessionRequest) -> SessionRequest:
    """Return the request for a session.

    Raises:
        InvalidField: a field is missing or too long.
    """
    if len(request.user_metadata) > MAX_LABELS:
        raise InvalidField('user_metadata', f'has {len(request.user_metadata)} labels; at most {MAX_LABELS}')
    for name, value in request.user_metadata.items():
        text_from_proto(name, 'user_metadata', limit=MAX_LABEL_LENGTH)
        text_from_proto(value, f'user_metadata[{name}]', limit=MAX_LABEL_VALUE_LENGTH)
    return SessionRequest(
        request_id=id_from_proto(request.request_id, 'request_id'),
        client=text_from_proto(request.client, 'client', limit=MAX_LABEL_LENGTH),
        user_metadata=dict(request.user_metadata),
        project_id=project_id_from_proto(request.project_id) if request.project_id else '',
    )


def finish_reason_from_proto(reason: messages.FinishReason.ValueType) -> FinishReason:
    """Return the reason why a client finished its session.

    Raises:
        InvalidField: the contract has no such value.
    """
    if reason not in _FINISH_REASONS:
        raise InvalidField('reason', 'must be SUCCESS, FAILED or INTERRUPTED')
    return _FINISH_REASONS[reason]


def session_to_proto(session: Session) -> messages.Session:
    """Return the message of a session."""
    return messages.Session(
        session_id=session.session_id,
        state=_STATES[session.state],
        client=session.client,
        user_metadata=session.user_metadata,
        create_time=timestamp_to_proto(session.create_time),
        heartbeat_time=timestamp_to_proto(session.heartbeat_time),
        project_id=session.project_id,
        checkpoint_paths=session.checkpoint_paths,
    )
