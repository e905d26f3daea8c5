"""Serves the contract for sessions, and converts its messages.

Functions raise InvalidField if a field is missing, malformed or out of range.
"""

# ruff: noqa: N802 (the methods have the contract's names)

from collections.abc import Mapping

from twinkle.api.gateway.v1 import session_service_pb2 as messages
from twinkle.api.gateway.v1 import session_service_pb2_grpc
from twinkle_services.gateway.keys.servicer import project_id_from_proto
from twinkle_services.gateway.page_tokens import next_token, page_from_proto
from twinkle_services.gateway.sessions.rules import FinishReason, Session, SessionRequest, SessionState
from twinkle_services.gateway.sessions.sessions import Sessions
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import (
    MAX_LABEL_LENGTH,
    duration_to_proto,
    id_from_proto,
    labels_from_proto,
    text_from_proto,
    timestamp_to_proto,
)

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


class SessionServicer(session_service_pb2_grpc.SessionServiceServicer):
    """Implements `SessionService`."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def CreateSession(
        self, request: messages.CreateSessionRequest, context: Context
    ) -> messages.CreateSessionResponse:
        session = await self._sessions.create(current_caller(), session_request_from_proto(request))
        return messages.CreateSessionResponse(
            session=session_to_proto(session), heartbeat_interval=duration_to_proto(self._sessions.heartbeat_interval)
        )

    async def Heartbeat(self, request: messages.HeartbeatRequest, context: Context) -> messages.HeartbeatResponse:
        session = await self._sessions.heartbeat(current_caller(), id_from_proto(request.session_id, 'session_id'))
        return messages.HeartbeatResponse(session=session_to_proto(session))

    async def GetSession(self, request: messages.GetSessionRequest, context: Context) -> messages.GetSessionResponse:
        session = await self._sessions.get(current_caller(), id_from_proto(request.session_id, 'session_id'))
        return messages.GetSessionResponse(session=session_to_proto(session))

    async def ListSessions(
        self, request: messages.ListSessionsRequest, context: Context
    ) -> messages.ListSessionsResponse:
        query = ('ListSessions', current_caller().tenant_id)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._sessions.list(current_caller(), page)
        return messages.ListSessionsResponse(
            sessions=map(session_to_proto, listing.items), next_page_token=next_token(listing.next_cursor, query=query)
        )

    async def FinishSession(
        self, request: messages.FinishSessionRequest, context: Context
    ) -> messages.FinishSessionResponse:
        session_id = id_from_proto(request.session_id, 'session_id')
        reason = finish_reason_from_proto(request.reason)
        session = await self._sessions.finish(current_caller(), session_id, reason=reason)
        return messages.FinishSessionResponse(session=session_to_proto(session))


def session_request_from_proto(request: messages.CreateSessionRequest) -> SessionRequest:
    return SessionRequest(
        request_id=id_from_proto(request.request_id, 'request_id'),
        client=text_from_proto(request.client, 'client', limit=MAX_LABEL_LENGTH),
        user_metadata=labels_from_proto(request.user_metadata, 'user_metadata'),
        project_id=project_id_from_proto(request.project_id) if request.project_id else '',
    )


def finish_reason_from_proto(reason: messages.FinishReason.ValueType) -> FinishReason:
    """Return the reason that a client gave for finishing its session; success if it gave none."""
    if reason not in _FINISH_REASONS:
        raise InvalidField('reason', 'must be SUCCESS, FAILED or INTERRUPTED')
    return _FINISH_REASONS[reason]


def session_to_proto(session: Session) -> messages.Session:
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
