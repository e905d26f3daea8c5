"""The client's stay at the gateway: begun, kept alive, ended."""

import asyncio
import logging
from datetime import timedelta

from twinkle.api.gateway.v1 import session_service_pb2 as pb
from twinkle.api.gateway.v1.session_service_pb2_grpc import SessionServiceStub
from twinkle_client.errors import Error
from twinkle_client.rpc import Connection, new_id

_log = logging.getLogger('twinkle_client')
_SHORT = timedelta(seconds=2)
_DEFAULT_INTERVAL = 10.0


class SessionKeeper:
    """Holds at most one session and sends its heartbeats. Lives on the connection's loop."""

    def __init__(self, connection: Connection, *, client: str) -> None:
        """Begin nothing yet; `client` names the program for whoever looks at the sessions."""
        self._connection = connection
        self._stub = SessionServiceStub(connection.channel)
        self._client = client
        self._session_id = ''
        self._heartbeats: asyncio.Task[None] | None = None

    @property
    def session_id(self) -> str:
        """The session's id; empty before it began and after it ended."""
        return self._session_id

    async def begin(self, *, interval: timedelta | None, project_id: str = '') -> pb.Session:
        """Begin a session; heartbeats go out every `interval`, or as often as the gateway says.

        Raises:
            NotFoundError: there is no such project.
            Error: the gateway refuses, such as for an unknown key.
        """
        request = pb.CreateSessionRequest(request_id=new_id('rq'), client=self._client, project_id=project_id)
        response = await self._connection.unary(self._stub.CreateSession, request)
        self._session_id = response.session.session_id
        asked = response.heartbeat_interval.ToTimedelta().total_seconds() or _DEFAULT_INTERVAL
        seconds = asked if interval is None else min(interval.total_seconds(), asked)
        self._stop_heartbeats()
        self._heartbeats = asyncio.create_task(self._beat(seconds))
        return response.session

    async def end(self, reason: pb.FinishReason.ValueType) -> None:
        """End the session, if there is one; a gateway that cannot be reached will let it expire."""
        self._stop_heartbeats()
        session_id, self._session_id = self._session_id, ''
        if not session_id:
            return
        request = pb.FinishSessionRequest(session_id=session_id, reason=reason)
        try:
            async with asyncio.timeout(_SHORT.total_seconds()):
                await self._connection.unary(self._stub.FinishSession, request, deadline=_SHORT)
        except (Error, TimeoutError) as error:
            _log.debug('the session was not ended: %s', error)

    def _stop_heartbeats(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None

    async def _beat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await self._connection.unary(self._stub.Heartbeat, pb.HeartbeatRequest(session_id=self._session_id))
            except Error as error:
                _log.warning('heartbeat failed: %s', error)
