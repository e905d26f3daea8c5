"""The verb that moves a session to another project."""

from dataclasses import replace

from services.gateway.errors import ProjectNotFound, SessionNotFound
from services.gateway.keys.ports import ProjectStore
from services.gateway.sessions.ports import SessionStore
from services.gateway.sessions.session import Session
from services.kit.caller import Caller


class AssignProject:
    """Moves a session, and with it its runs, to a project or out of all."""

    def __init__(self, sessions: SessionStore, projects: ProjectStore) -> None:
        """Keep sessions in `sessions`; they belong to some of `projects`."""
        self._sessions = sessions
        self._projects = projects

    async def __call__(self, caller: Caller, session_id: str, *, project_id: str) -> Session:
        """Return the session; an empty `project_id` means no project.

        Raises:
            SessionNotFound: the caller has no such session.
            ProjectNotFound: the caller's tenant has no such project.
        """
        if project_id and await self._projects.get(caller.tenant_id, project_id) is None:
            raise ProjectNotFound(project_id)
        session = await self._sessions.change(
            caller.tenant_id, session_id, lambda found: replace(found, project_id=project_id)
        )
        if session is None:
            raise SessionNotFound(session_id)
        return session
