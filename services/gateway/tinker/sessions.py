"""Routes that create, renew, finish, list, search and describe client sessions, and assign them to projects."""

import json
from typing import Annotated

from pydantic import Field, field_validator

from twinkle_services.gateway.catalogue.paths import path_of_native
from twinkle_services.gateway.catalogue.sql import SqlBrowser
from twinkle_services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.sampling.ports import HandleStore
from twinkle_services.gateway.sessions.rules import SessionRequest
from twinkle_services.gateway.sessions.sessions import Sessions
from twinkle_services.gateway.tinker.bodies import Labels, ShortText, TinkerModel, labels_to_json, read_body
from twinkle_services.gateway.tinker.routes import CATALOGUE, SESSIONS, checked_query_of, slice_of, tinker_route
from twinkle_services.gateway.tinker.session_search import (
    FINISH_REASONS,
    OWN_LABELS,
    SearchBody,
    SessionSearch,
    own_label,
)
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.rpc.context import current_caller

SAVED_LABEL = 'twinkle:saved_checkpoints'
"""Label with the paths in `Session.checkpoint_paths`, converted to Tinker paths and separated by spaces."""
_MAX_TAG_CHARACTERS = 4096
"""Maximum number of characters of all tags, as JSON."""
_UNEMBED_NOTICE = 'train_unembed has no effect on this server: the output head has the weights of the base model'


class SessionBody(TinkerModel):
    """Body of `create_session`."""

    user_metadata: Labels = Field(default_factory=dict[str, str])
    tags: Annotated[list[ShortText], Field(fail_fast=True)] = Field(default_factory=list[str])
    display_name: ShortText = ''
    sdk_version: ShortText = ''
    project_id: ShortText = ''

    def request(self, request_id: str) -> SessionRequest:
        tags = json.dumps(self.tags) if self.tags else ''
        if len(tags) > _MAX_TAG_CHARACTERS:
            raise InvalidField('tags', f'must have at most {_MAX_TAG_CHARACTERS} characters in total')
        own = {'display_name': self.display_name, 'tags': tags}
        return SessionRequest(
            request_id=request_id,
            client=f'tinker {self.sdk_version}'.strip()[:128],
            user_metadata={**self.user_metadata, **{OWN_LABELS[name]: value for name, value in own.items() if value}},
            project_id=self.project_id,
        )


class HeartbeatBody(TinkerModel):
    """Body of `session_heartbeat`."""

    session_id: Annotated[str, Field(min_length=1, max_length=128)]


class SessionEnd(TinkerModel):
    """Reason for the end of a session, as the client reports it."""

    type: str = 'success'

    @field_validator('type')
    @classmethod
    def _check_type(cls, kind: str) -> str:
        if kind not in FINISH_REASONS:
            raise ValueError(f'must be one of {", ".join(FINISH_REASONS)}')
        return kind


class FinishBody(TinkerModel):
    """Body of `sessions/{session_id}/finish`."""

    reason: SessionEnd = SessionEnd()


class ProjectBody(TinkerModel):
    """Body of `sessions/{session_id}/project`."""

    project_id: ShortText = ''


class SessionRoutes:
    """Routes that create, renew and finish sessions."""

    def __init__(self, sessions: Sessions, *, is_unembed_trained: bool) -> None:
        """Create the routes; new sessions receive a notice unless `is_unembed_trained`."""
        self._sessions = sessions
        self._notice = {} if is_unembed_trained else {'info_message': _UNEMBED_NOTICE}

    def routes(self) -> list[Route]:
        return [
            tinker_route('create_session', self._create, access=SESSIONS),
            tinker_route('session_heartbeat', self._heartbeat, access=SESSIONS),
            tinker_route('sessions/{session_id}/finish', self._finish, access=SESSIONS),
        ]

    async def _create(self, call: HttpCall) -> Response:
        # The SDK sends the same key with all HTTP retries of a call.
        request_id = call.headers.get('x-idempotency-key', '')[:256] or new_id('rq')
        request = (await read_body(call, SessionBody)).request(request_id)
        session = await self._sessions.create(current_caller(), request)
        return JsonResponse({'session_id': session.session_id, 'type': 'create_session', **self._notice})

    async def _heartbeat(self, call: HttpCall) -> Response:
        given = await read_body(call, HeartbeatBody)
        await self._sessions.heartbeat(current_caller(), given.session_id)
        return JsonResponse({'type': 'session_heartbeat'})

    async def _finish(self, call: HttpCall) -> Response:
        given = await read_body(call, FinishBody)
        session_id = call.path_values['session_id']
        await self._sessions.finish(current_caller(), session_id, reason=FINISH_REASONS[given.reason.type])
        return JsonResponse({'session_id': session_id})


class SessionListRoutes:
    """Routes that list, describe and search the sessions of a tenant, and assign them to projects."""

    def __init__(self, browser: SqlBrowser, sessions: Sessions, search: SessionSearch, *, handles: HandleStore) -> None:
        self._browser = browser
        self._sessions = sessions
        self._search_sessions = search
        self._handles = handles

    def routes(self) -> list[Route]:
        return [
            tinker_route('sessions', self._list, access=CATALOGUE, http_method='GET'),
            tinker_route('sessions/{session_id}', self._show, access=CATALOGUE, http_method='GET'),
            tinker_route('sessions/{session_id}/trace_export', self._export, access=CATALOGUE, http_method='GET'),
            tinker_route('sessions/search', self._search, access=CATALOGUE),
            tinker_route('sessions/{session_id}/project', self._assign, access=SESSIONS, http_method='PUT'),
        ]

    async def _list(self, call: HttpCall) -> Response:
        query = checked_query_of(call)
        part = slice_of(query, limit=20)
        found = await self._browser.sessions(current_caller().tenant_id, part, project_id=query.get('project_id', ''))
        return JsonResponse({'sessions': [session.session_id for session in found.items]})

    async def _show(self, call: HttpCall) -> Response:
        checked_query_of(call)
        session = await self._sessions.get(current_caller(), call.path_values['session_id'])
        run_ids = await self._browser.run_ids(session.tenant_id, session_id=session.session_id)
        handles = await self._handles.list_of_session(session.tenant_id, session.session_id)
        saved = [str(path_of_native(path)) for path in session.checkpoint_paths]
        labels = {**session.user_metadata, **({SAVED_LABEL: ' '.join(saved)} if saved else {})}
        return JsonResponse(
            {
                'training_run_ids': list(run_ids),
                'sampler_ids': [handle.handle_id for handle in handles],
                'user_metadata': labels_to_json(labels),
                'display_name': own_label(session, 'display_name') or None,
            }
        )

    async def _search(self, call: HttpCall) -> Response:
        return JsonResponse(await self._search_sessions(await read_body(call, SearchBody)))

    async def _assign(self, call: HttpCall) -> Response:
        given = await read_body(call, ProjectBody)
        session_id = call.path_values['session_id']
        session = await self._sessions.assign_project(current_caller(), session_id, project_id=given.project_id)
        return JsonResponse({'session_id': session.session_id, 'project_id': session.project_id})

    async def _export(self, call: HttpCall) -> Response:
        await self._sessions.get(current_caller(), call.path_values['session_id'])
        return JsonResponse({'status': 'failed', 'error': 'this server does not record traces of sessions'})
