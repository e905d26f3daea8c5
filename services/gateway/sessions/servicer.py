"""Serves the contract for sessions."""

# ruff: noqa: N802 (the methods have the contract's names)

from typing import Any

import grpc

from services.gateway.page_tokens import next_token, page_from_proto
from services.gateway.sessions import convert
from services.gateway.sessions.sessions import Sessions
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import duration_to_proto, id_from_proto
from twinkle.api.gateway.v1 import session_service_pb2 as messages
from twinkle.api.gateway.v1 import session_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class SessionServicer(session_service_pb2_grpc.SessionServiceServicer):
    """Implements `SessionService`."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def CreateSession(
        self, request: messages.CreateSessionRequest, context: Context
    ) -> messages.CreateSessionResponse:
        session = await self._sessions.create(current_caller(), convert.session_request_from_proto(request))
        return messages.CreateSessionResponse(
            session=convert.session_to_proto(session),
            heartbeat_interval=duration_to_proto(self._sessions.heartbeat_interval),
        )

    async def Heartbeat(self, request: messages.HeartbeatRequest, context: Context) -> messages.HeartbeatResponse:
        session = await self._sessions.heartbeat(current_caller(), id_from_proto(request.session_id, 'session_id'))
        return messages.HeartbeatResponse(session=convert.session_to_proto(session))

    async def GetSession(self, request: messages.GetSessionRequest, context: Context) -> messages.GetSessionResponse:
        session = await self._sessions.get(current_caller(), id_from_proto(request.session_id, 'session_id'))
        return messages.GetSessionResponse(session=convert.session_to_proto(session))

    async def ListSessions(
        self, request: messages.ListSessionsRequest, context: Context
    ) -> messages.ListSessionsResponse:
        query = ('ListSessions', current_caller().tenant_id)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._sessions.list(current_caller(), page)
        return messages.ListSessionsResponse(
            sessions=map(convert.session_to_proto, listing.items),
            next_page_token=next_token(listing.next_cursor, query=query),
        )

    async def FinishSession(
        self, request: messages.FinishSessionRequest, context: Context
    ) -> messages.FinishSessionResponse:
        session_id = id_from_proto(request.session_id, 'session_id')
        reason = convert.finish_reason_from_proto(request.reason)
        session = await self._sessions.finish(current_caller(), session_id, reason=reason)
        return messages.FinishSessionResponse(session=convert.session_to_proto(session))
