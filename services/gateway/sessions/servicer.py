"""Serves the contract for sessions."""

from datetime import timedelta
from typing import Any

import grpc

from services.gateway.page_tokens import next_token, page_from_proto
from services.gateway.sessions import convert
from services.gateway.sessions.create_session import CreateSession
from services.gateway.sessions.finish_session import FinishSession
from services.gateway.sessions.get_session import GetSession
from services.gateway.sessions.heartbeat import Heartbeat
from services.gateway.sessions.list_sessions import ListSessions
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import duration_to_proto, id_from_proto
from twinkle.api.gateway.v1 import session_service_pb2 as messages
from twinkle.api.gateway.v1 import session_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class SessionServicer(session_service_pb2_grpc.SessionServiceServicer):
    """Converts, calls the verb, converts."""

    def __init__(
        self,
        *,
        create: CreateSession,
        heartbeat: Heartbeat,
        get: GetSession,
        list_sessions: ListSessions,
        finish: FinishSession,
        heartbeat_interval: timedelta,
    ) -> None:
        """Serve these verbs, and ask clients for a heartbeat every `heartbeat_interval`."""
        self._create = create
        self._heartbeat = heartbeat
        self._get = get
        self._list = list_sessions
        self._finish = finish
        self._heartbeat_interval = heartbeat_interval

    async def CreateSession(  # noqa: N802 (the contract's name)
        self, request: messages.CreateSessionRequest, context: Context
    ) -> messages.CreateSessionResponse:
        """Begin a session."""
        session = await self._create(current_caller(), convert.session_order_from_proto(request))
        return messages.CreateSessionResponse(
            session=convert.session_to_proto(session),
            heartbeat_interval=duration_to_proto(self._heartbeat_interval),
        )

    async def Heartbeat(  # noqa: N802 (the contract's name)
        self, request: messages.HeartbeatRequest, context: Context
    ) -> messages.HeartbeatResponse:
        """Keep a session alive."""
        session = await self._heartbeat(current_caller(), id_from_proto(request.session_id, 'session_id'))
        return messages.HeartbeatResponse(session=convert.session_to_proto(session))

    async def GetSession(  # noqa: N802 (the contract's name)
        self, request: messages.GetSessionRequest, context: Context
    ) -> messages.GetSessionResponse:
        """Show a session."""
        session = await self._get(current_caller(), id_from_proto(request.session_id, 'session_id'))
        return messages.GetSessionResponse(session=convert.session_to_proto(session))

    async def ListSessions(  # noqa: N802 (the contract's name)
        self, request: messages.ListSessionsRequest, context: Context
    ) -> messages.ListSessionsResponse:
        """List the caller's sessions."""
        query = ('ListSessions', current_caller().tenant_id)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._list(current_caller(), page)
        return messages.ListSessionsResponse(
            sessions=map(convert.session_to_proto, listing.items),
            next_page_token=next_token(listing.next_cursor, query=query),
        )

    async def FinishSession(  # noqa: N802 (the contract's name)
        self, request: messages.FinishSessionRequest, context: Context
    ) -> messages.FinishSessionResponse:
        """End a session."""
        session_id = id_from_proto(request.session_id, 'session_id')
        reason = convert.finish_reason_from_proto(request.reason)
        session = await self._finish(current_caller(), session_id, reason=reason)
        return messages.FinishSessionResponse(session=convert.session_to_proto(session))
