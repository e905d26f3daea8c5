"""The client's session at the gateway and its heartbeats."""

import asyncio
import logging
from datetime import timedelta

from twinkle.api.gateway.v1 import session_service_pb2 as pb
from twinkle.api.gateway.v1.session_service_pb2_grpc import SessionServiceStub
from twinkle_client.errors import Error
from twinkle_client.rpc import Connection, new_id

_log = logging.getLogger('twinkle_client')
_FINISH_TIMEOUT = timedelta(seconds=2)
_DEFAULT_INTERVAL_SECONDS = 10.0


class SessionKeeper:
    """Creates and finishes the session, and sends its heartbeats.

    Args:
        connection: Connection to the gateway.
        client: Name and version of the client, for lists of sessions.

    Concurrency: call the methods on the clients' event loop.
    """

    def __init__(self, connection: Connection, *, client: str) -> None:
        self._connection = connection
        self._stub = SessionServiceStub(connection.channel)
        self._client = client
        self._session_id = ''
        self._heartbeats: asyncio.Task[None] | None = None

    @property
    def session_id(self) -> str:
        """Id of the session; empty without a session."""
        return self._session_id

    async def begin(self, *, interval: timedelta | None, project_id: str = '') -> pb.Session:
        """Create a session and start its heartbeats.

        Args:
            interval: Time between heartbeats, at most the gateway's interval. Unset: the gateway's interval.
            project_id: Project of the session. Empty: the project of the API key.

        Raises:
            NotFoundError: The project does not exist.
            Error: The gateway refused the session, for example because of an unknown API key.
        """
        request = pb.CreateSessionRequest(request_id=new_id('rq'), client=self._client, project_id=project_id)
        response = await self._connection.unary(self._stub.CreateSession, request)
        self._session_id = response.session.session_id
        longest = response.heartbeat_interval.ToTimedelta().total_seconds() or _DEFAULT_INTERVAL_SECONDS
        seconds = longest if interval is None else min(interval.total_seconds(), longest)
        self._stop_heartbeats()
        self._heartbeats = asyncio.create_task(self._send_heartbeats(seconds))
        return response.session

    async def end(self, reason: pb.FinishReason.ValueType) -> None:
        """Finish the session, if any. If the gateway cannot be reached, the session expires later."""
        self._stop_heartbeats()
        session_id, self._session_id = self._session_id, ''
        if not session_id:
            return
        request = pb.FinishSessionRequest(session_id=session_id, reason=reason)
        try:
            async with asyncio.timeout(_FINISH_TIMEOUT.total_seconds()):
                await self._connection.unary(self._stub.FinishSession, request, deadline=_FINISH_TIMEOUT)
        except (Error, TimeoutError) as error:
            _log.debug('session not finished: %s', error)

    def _stop_heartbeats(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None

    async def _send_heartbeats(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await self._connection.unary(self._stub.Heartbeat, pb.HeartbeatRequest(session_id=self._session_id))
            except Error as error:
                _log.warning('heartbeat failed: %s', error)
