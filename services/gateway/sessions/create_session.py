"""The verb that begins a session."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.gateway.errors import ProjectNotFound
from services.gateway.keys.ports import ProjectStore
from services.gateway.sessions.ports import SessionStore
from services.gateway.sessions.session import Session, SessionState
from services.kit.caller import Caller
from services.kit.clock import Clock
from services.kit.errors import RequestIdReused
from services.kit.ids import new_id


@dataclass(frozen=True, kw_only=True)
class SessionOrder:
    """What session is asked for."""

    request_id: str
    client: str
    user_metadata: Mapping[str, str]
    project_id: str = ''
    """Of the caller's tenant; empty: the one of the caller's key."""


class CreateSession:
    """Begins a session; the same request id again returns the same session."""

    def __init__(self, sessions: SessionStore, projects: ProjectStore, *, clock: Clock) -> None:
        """Keep sessions in `sessions`; they belong to some of `projects`."""
        self._sessions = sessions
        self._projects = projects
        self._clock = clock

    async def __call__(self, caller: Caller, order: SessionOrder) -> Session:
        """Return the session.

        Raises:
            ProjectNotFound: the caller's tenant has no such project.
            RequestIdReused: the request id came before with other content.
        """
        if order.project_id and await self._projects.get(caller.tenant_id, order.project_id) is None:
            raise ProjectNotFound(order.project_id)
        now = self._clock.now()
        session = Session(
            session_id=new_id('ses'),
            tenant_id=caller.tenant_id,
            request_id=order.request_id,
            state=SessionState.ACTIVE,
            client=order.client,
            user_metadata=order.user_metadata,
            create_time=now,
            heartbeat_time=now,
            project_id=order.project_id or caller.project_id,
        )
        kept = await self._sessions.add_if_absent(session)
        if not kept.is_same_request(session):
            raise RequestIdReused(order.request_id)
        return kept
