"""Lists of sessions, what is known of one, and the project it belongs to."""

from collections.abc import Awaitable, Callable

from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.sessions.ports import SessionStore
from services.gateway.sessions.rules import Session
from services.gateway.sessions.sessions import Sessions
from services.gateway.tinker.bodies import read_body
from services.gateway.tinker.catalogue_answers import labels_to_json, own_label
from services.gateway.tinker.catalogue_ports import Browser, SamplerIds
from services.gateway.tinker.fields import Fields, bounded_text
from services.gateway.tinker.paths import path_of_native
from services.gateway.tinker.ports import FindSession
from services.gateway.tinker.queries import check_scope, query_of, slice_of
from services.gateway.tinker.routes import CATALOGUE, SESSIONS, tinker_route
from services.gateway.tinker.session_search import SessionSearch, search_of
from services.kit.rpc.context import current_caller

SAVED_LABEL = 'twinkle:saved_checkpoints'
"""Where a session that expired says what was saved of it: paths, with spaces between them."""
_project_id = bounded_text(0, 1024)


class SessionListRoutes:
    """Serves them."""

    def __init__(
        self,
        browser: Browser,
        store: SessionStore,
        *,
        sessions: Sessions,
        find_session: FindSession,
        sampler_ids: SamplerIds,
    ) -> None:
        self._browser = browser
        self._find_session = find_session
        self._sampler_ids = sampler_ids
        self._sessions = sessions
        self._search_sessions = SessionSearch(browser, store, find_session=find_session)

    def routes(self) -> list[Route]:
        """Return the routes."""
        listed: list[tuple[str, Callable[[HttpCall], Awaitable[Response]]]] = [
            ('sessions', self._list),
            ('sessions/{session_id}', self._show),
            ('sessions/{session_id}/trace_export', self._export_trace),
        ]
        return [
            *(tinker_route(path, serve, access=CATALOGUE, http_method='GET') for path, serve in listed),
            tinker_route('sessions/search', self._search, access=CATALOGUE),
            tinker_route('sessions/{session_id}/project', self._assign, access=SESSIONS, http_method='PUT'),
        ]

    async def _list(self, call: HttpCall) -> Response:
        query = query_of(call)
        check_scope(query)
        part = slice_of(query, limit=20)
        found = await self._browser.sessions(current_caller().tenant_id, part, project_id=query.get('project_id', ''))
        return JsonResponse({'sessions': [session.session_id for session in found.items]})

    async def _show(self, call: HttpCall) -> Response:
        check_scope(query_of(call))
        session = await self._find_session(call.path_values['session_id'])
        run_ids = await self._browser.run_ids(session.tenant_id, session_id=session.session_id)
        return JsonResponse(
            {
                'training_run_ids': list(run_ids),
                'sampler_ids': list(await self._sampler_ids(session.session_id)),
                'user_metadata': labels_to_json({**session.user_metadata, **_saved(session)}),
                'display_name': own_label(session, 'display_name') or None,
            }
        )

    async def _search(self, call: HttpCall) -> Response:
        return JsonResponse(await self._search_sessions(await read_body(call, search_of)))

    async def _assign(self, call: HttpCall) -> Response:
        project_id = await read_body(call, lambda body: Fields(body).get('project_id', _project_id, ''))
        session_id = call.path_values['session_id']
        session = await self._sessions.assign_project(current_caller(), session_id, project_id=project_id)
        return JsonResponse({'session_id': session.session_id, 'project_id': session.project_id})

    async def _export_trace(self, call: HttpCall) -> Response:
        await self._find_session(call.path_values['session_id'])
        return JsonResponse({'status': 'failed', 'error': 'traces of sessions are not kept here'})


def _saved(session: Session) -> dict[str, str]:
    """Return what says where the weights are that were saved when the session ended, as a label."""
    paths = [str(path_of_native(path)) for path in session.checkpoint_paths]
    return {SAVED_LABEL: ' '.join(paths)} if paths else {}
