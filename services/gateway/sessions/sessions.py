"""Operations on sessions."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.errors import SessionNotFound
from twinkle_services.gateway.keys.tenants import Projects
from twinkle_services.gateway.paging import Listing, Page
from twinkle_services.gateway.sessions.rules import FinishReason, Session, SessionRequest, SessionState
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import RequestIdReused
from twinkle_services.kit.ids import new_id


class Sessions:
    """Creates, lists, renews and finishes the sessions of a caller.

    `get` and `list` return the state at the moment of the call: a session is expired if its last heartbeat is older
    than `lifetime`. Clients send a heartbeat every `heartbeat_interval`. Methods for one session raise SessionNotFound
    if the caller has no such session.
    """

    def __init__(
        self,
        store: SqlSessionStore,
        projects: Projects,
        *,
        lifetime: timedelta,
        clock: Clock,
        heartbeat_interval: timedelta = timedelta(seconds=30),
    ) -> None:
        self._store = store
        self._projects = projects
        self._lifetime = lifetime
        self._clock = clock
        self.heartbeat_interval = heartbeat_interval

    async def create(self, caller: Caller, request: SessionRequest) -> Session:
        """Create a session; the same request id returns the same session.

        Raises:
            ProjectNotFound: the caller's tenant has no such project.
            RequestIdReused: the request id was used with different content.
        """
        await self._projects.check(caller.tenant_id, request.project_id)
        now = self._clock.now()
        session = Session(
            session_id=new_id('ses'),
            tenant_id=caller.tenant_id,
            request_id=request.request_id,
            state=SessionState.ACTIVE,
            client=request.client,
            user_metadata=request.user_metadata,
            create_time=now,
            heartbeat_time=now,
            project_id=request.project_id or caller.project_id,
        )
        stored = await self._store.add_if_absent(session)
        if not stored.is_same_request(session):
            raise RequestIdReused(request.request_id)
        return stored

    async def heartbeat(self, caller: Caller, session_id: str) -> Session:
        """Renew a session; an expired one becomes active.

        Raises:
            SessionFinished: the client has finished the session.
        """
        now = self._clock.now()
        return await self._change(caller, session_id, lambda session: session.with_heartbeat(now))

    async def get(self, caller: Caller, session_id: str) -> Session:
        session = await self._store.get(caller.tenant_id, session_id)
        if session is None:
            raise SessionNotFound(session_id)
        return session.as_of(self._clock.now(), lifetime=self._lifetime)

    async def list(self, caller: Caller, page: Page) -> Listing[Session]:
        """Return one page of the caller's sessions, newest first."""
        now, listing = self._clock.now(), await self._store.list_newest(caller.tenant_id, page)
        return replace(listing, items=[session.as_of(now, lifetime=self._lifetime) for session in listing.items])

    async def assign_project(self, caller: Caller, session_id: str, *, project_id: str) -> Session:
        """Move a session and its runs to a project; an empty `project_id` removes them from their project.

        Raises:
            ProjectNotFound: the caller's tenant has no such project.
        """
        await self._projects.check(caller.tenant_id, project_id)
        return await self._change(caller, session_id, lambda session: replace(session, project_id=project_id))

    async def finish(self, caller: Caller, session_id: str, *, reason: FinishReason) -> Session:
        """Finish a session; finishing it again changes nothing."""
        return await self._change(caller, session_id, lambda session: session.finished(reason))

    async def _change(self, caller: Caller, session_id: str, change: Callable[[Session], Session]) -> Session:
        session = await self._store.change(caller.tenant_id, session_id, change)
        if session is None:
            raise SessionNotFound(session_id)
        return session


def open_sessions(config: GatewayConfig, database: Database, projects: Projects, *, clock: Clock) -> Sessions:
    """Return the operations on the sessions in `database`."""
    store, interval = SqlSessionStore(database), config.heartbeat_interval
    return Sessions(store, projects, lifetime=config.session_lifetime, heartbeat_interval=interval, clock=clock)
